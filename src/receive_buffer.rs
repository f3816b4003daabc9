//! Receive buffers of HTTP/2 streams: small DATA frames are merged as they arrive.
//!
//! Flow control bounds the bytes of DATA that a peer may have under way, not the number of frames that carry them. The h2
//! crate keeps every frame that has not been read as an event of about 256 bytes. To bound that memory it closes the
//! connection (ENHANCE_YOUR_CALM, `too_many_data_frames`) when too many small frames are unread. A client stream of small
//! gRPC messages is enough for that where the reader is slower than the sender.
//!
//! So no frame stays in the h2 crate for long. The task that drives a connection reads at most `TURN_BYTES` at a time.
//! Then it moves what has arrived for each stream into the stream's receive buffer, where small chunks are copied together.
//! Flow control is credited only when the reader takes the bytes. The memory of a connection is therefore bounded by its
//! flow-control windows, whatever the size of the frames.
//!
//! Frames that arrive after nobody reads their stream any more are discarded: [`ReceiveBuffers::discarded_bytes`].
//!
//! ```text
//! socket ──TURN_BYTES──▶ h2 ──fill──▶ receive buffer ──poll_data──▶ reader
//!                        frames       merged chunks      window credited
//! ```

use std::{
    cell::{Cell, RefCell},
    collections::VecDeque,
    mem,
    rc::{Rc, Weak},
    task::{Context, Poll, Waker},
    time::Duration,
};

use bytes::{Bytes, BytesMut};
use h2::RecvStream;
use http::HeaderMap;

/// Bytes that are read from a connection before its receive buffers are filled.
const TURN_BYTES: usize = 64 * 1024;
/// The allowance of the h2 crate for small DATA frames: none is needed, since no frame stays unread for longer than a turn
/// (64 KiB of the smallest take 1.7 MB there). The crate also charges every frame that arrives on a stream after it was
/// reset, and never credits it: a connection on which many uploads are answered early would be closed for frames that its
/// client had sent before it saw the answer. [`ReceiveBuffers::discarded_bytes`] bounds those frames instead.
pub const DATA_FRAME_BUDGET: usize = usize::MAX;
/// Streams of one connection that were reset and are remembered, so that frames that were under way are ignored. On a stream
/// that is forgotten each is an error of its own.
pub const MAX_REMEMBERED_RESETS: usize = 1024;
/// How long they are remembered: what a slow peer has under way may take several seconds.
pub const RESET_MEMORY: Duration = Duration::from_secs(10);
/// Chunks of this size are kept as they are. The h2 crate slices them from blocks of up to 16 KiB.
const MERGE_BELOW: usize = 4 * 1024;
/// The size up to which small chunks are merged.
const MAX_MERGED_BYTES: usize = 16 * 1024;

/// The receive buffers of one connection.
#[derive(Debug, Default)]
pub struct ReceiveBuffers {
    read_bytes: Cell<usize>,
    open: RefCell<Vec<Weak<RefCell<Buffered>>>>,
    totals: Rc<Totals>,
}

/// Totals of one connection.
#[derive(Debug, Default)]
struct Totals {
    /// Bytes of DATA on the wire, without padding.
    arrived_bytes: Cell<u64>,
    /// Those of them that reached a receive buffer.
    received_bytes: Cell<u64>,
    /// Buffers that were dropped before their data had ended.
    unfinished: Cell<u64>,
}

/// What one stream receives.
#[derive(Debug)]
pub struct ReceiveBuffer(Rc<RefCell<Buffered>>);

#[derive(Debug)]
struct Buffered {
    stream: RecvStream,
    totals: Rc<Totals>,
    chunks: VecDeque<Bytes>,
    /// Behind them: the last chunk as it came, or several small ones merged. Never both.
    last: Bytes,
    merged: BytesMut,
    /// The data has ended, or broken off.
    end: Option<Result<(), h2::Error>>,
    /// The task that reads, and whether it waits for more.
    reader: Waker,
    is_awaited: bool,
}

impl ReceiveBuffers {
    /// A buffer for a stream that is received.
    pub fn open(&self, stream: RecvStream) -> ReceiveBuffer {
        let buffered = Rc::new(RefCell::new(Buffered {
            stream,
            totals: Rc::clone(&self.totals),
            chunks: VecDeque::new(),
            last: Bytes::new(),
            merged: BytesMut::new(),
            end: None,
            reader: Waker::noop().clone(),
            is_awaited: false,
        }));
        let mut open = self.open.borrow_mut();
        if open.len() == open.capacity() {
            open.retain(|buffer| buffer.strong_count() > 0);
        }
        open.push(Rc::downgrade(&buffered));
        ReceiveBuffer(buffered)
    }

    /// Whether the connection may be read in this turn. Where not, [`end_turn`](Self::end_turn) wakes the reader.
    pub fn may_read(&self) -> bool {
        self.read_bytes.get() < TURN_BYTES
    }

    /// Bytes were read from the connection.
    pub fn read(&self, bytes: usize) {
        self.read_bytes.set(self.read_bytes.get() + bytes);
    }

    /// A DATA frame with so many bytes, padding aside, is among what was read.
    pub fn data_arrived(&self, bytes: u64) {
        add(&self.totals.arrived_bytes, bytes);
    }

    /// Bytes of DATA that reached no receive buffer, at the end of a turn: their streams had been answered or reset.
    pub fn discarded_bytes(&self) -> u64 {
        let arrived = self.totals.arrived_bytes.get();
        arrived.saturating_sub(self.totals.received_bytes.get())
    }

    /// How many streams stopped being read before their data had ended. On each of them a peer that respects flow control
    /// can have one window of data under way.
    pub fn unfinished_streams(&self) -> u64 {
        self.totals.unfinished.get()
    }

    /// To be called by the task that drives the connection, when the connection has nothing more to do. Lets the readers
    /// run before the next turn. Returns whether a turn has ended.
    pub fn end_turn(&self, cx: &Context<'_>) -> bool {
        if self.may_read() {
            return false;
        }
        self.read_bytes.set(0);
        self.open.borrow_mut().retain(|buffer| {
            let Some(buffer) = buffer.upgrade() else {
                return false;
            };
            buffer.borrow_mut().fill();
            true
        });
        cx.waker().wake_by_ref();
        true
    }
}

fn add(total: &Cell<u64>, count: u64) {
    total.set(total.get().saturating_add(count));
}

impl ReceiveBuffer {
    /// The next bytes; `None` at the end of the data. What is returned, the peer may send again as much.
    pub fn poll_data(&self, cx: &Context<'_>) -> Poll<Option<Result<Bytes, h2::Error>>> {
        let this = &mut *self.0.borrow_mut();
        if this.is_empty() {
            if !this.reader.will_wake(cx.waker()) {
                this.reader.clone_from(cx.waker());
            }
            this.is_awaited = true;
            this.fill();
        }
        let next = match this.pop() {
            Some(chunk) => {
                this.credit(chunk.len());
                Some(Ok(chunk))
            }
            None => match this.end.replace(Ok(())) {
                Some(Ok(())) => None,
                Some(Err(error)) => Some(Err(error)),
                None => {
                    this.end = None;
                    return Poll::Pending;
                }
            },
        };
        this.is_awaited = false;
        Poll::Ready(next)
    }

    /// The trailers, once the data has ended.
    pub fn poll_trailers(
        &self,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Option<HeaderMap>, h2::Error>> {
        self.0.borrow_mut().stream.poll_trailers(cx)
    }

    /// Whether everything was taken, and there are no trailers.
    pub fn is_end_stream(&self) -> bool {
        let this = self.0.borrow();
        this.is_empty() && !matches!(this.end, Some(Err(_))) && this.stream.is_end_stream()
    }
}

impl Buffered {
    fn is_empty(&self) -> bool {
        self.chunks.is_empty() && self.last.is_empty() && self.merged.is_empty()
    }

    /// Takes all that has arrived. What arrives later wakes the reader, if it waits.
    fn fill(&mut self) {
        let reader = mem::replace(&mut self.reader, Waker::noop().clone());
        let mut cx = Context::from_waker(match self.is_awaited {
            true => &reader,
            false => Waker::noop(),
        });
        while self.end.is_none()
            && let Poll::Ready(data) = self.stream.poll_data(&mut cx)
        {
            match data {
                Some(Ok(data)) => self.push(data),
                Some(Err(error)) => self.end = Some(Err(error)),
                None => self.end = Some(Ok(())),
            }
        }
        self.reader = reader;
    }

    fn push(&mut self, data: Bytes) {
        add(&self.totals.received_bytes, data.len() as u64);
        let is_small = data.len() < MERGE_BELOW;
        if !self.merged.is_empty() {
            if is_small && self.merged.len() + data.len() <= MAX_MERGED_BYTES {
                self.merged.extend_from_slice(&data);
                return;
            }
            self.chunks.push_back(self.merged.split().freeze());
        } else if !self.last.is_empty() {
            let last = mem::take(&mut self.last);
            if is_small && last.len() < MERGE_BELOW {
                self.merged.extend_from_slice(&last);
                self.merged.extend_from_slice(&data);
                return;
            }
            self.chunks.push_back(last);
        }
        self.last = data;
    }

    fn pop(&mut self) -> Option<Bytes> {
        let chunk = match self.chunks.pop_front() {
            Some(chunk) => chunk,
            None if self.last.is_empty() => self.merged.split().freeze(),
            None => mem::take(&mut self.last),
        };
        (!chunk.is_empty()).then_some(chunk)
    }

    fn credit(&mut self, bytes: usize) {
        if bytes == 0 {
            return;
        }
        // fails only on a stream that is gone, which the next read reports
        let _ = self.stream.flow_control().release_capacity(bytes);
    }
}

impl Drop for Buffered {
    /// Bytes that nobody takes still count in the window of the connection.
    fn drop(&mut self) {
        if self.end.is_none() && !self.stream.is_end_stream() {
            add(&self.totals.unfinished, 1);
        }
        let chunks: usize = self.chunks.iter().map(Bytes::len).sum();
        self.credit(chunks + self.last.len() + self.merged.len());
    }
}
