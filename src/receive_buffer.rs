//! Receive buffers of HTTP/2 streams: small DATA frames are merged as they arrive.
//!
//! Flow control bounds the bytes of DATA that a peer may have in flight, not the number of frames.
//! The h2 crate keeps every unread frame as an event of about 256 bytes. To bound that memory, it
//! closes the connection (ENHANCE_YOUR_CALM, `too_many_data_frames`) when too many small frames are
//! unread. A client stream of small gRPC messages can cause this if the reader is slower than the
//! sender.
//!
//! So frames leave the h2 crate quickly. The task that drives a connection reads at most
//! `TURN_BYTES` and `TURN_FRAMES` at a time. Then it moves the data of each stream into that
//! stream's receive buffer, where small chunks are merged. Flow control is credited only when the reader takes the bytes. So
//! the memory of a connection is bounded by its flow-control windows, whatever the frame size.
//!
//! Frames for a stream that nobody reads any more are discarded and counted in
//! [`ReceiveBuffers::discarded_bytes`].
//!
//! ```text
//! socket ──TurnReader──▶ h2 ──fill──▶ receive buffer ──poll_data──▶ reader
//!                        frames       merged chunks      window credited
//! ```

mod frame_meter;
mod turn_reader;

use std::{
    cell::{Cell, RefCell},
    collections::{HashMap, VecDeque},
    mem,
    rc::{Rc, Weak},
    task::{Context, Poll, Waker},
    time::Duration,
};

use bytes::{Bytes, BytesMut};
use h2::RecvStream;
use http::HeaderMap;

pub use frame_meter::FrameHead;
pub use turn_reader::TurnReader;

/// The most bytes read from a connection before its receive buffers are filled.
const TURN_BYTES: usize = 64 * 1024;
/// The most frames with content or fields that are read in the same time. The h2 crate keeps the
/// memory for as many events (64 KiB) as long as the connection lives; 64 KiB of the smallest
/// frames would take 1.7 MB. With fewer, readers would be woken for every few bytes.
const TURN_FRAMES: usize = 256;
/// Limit of the h2 crate for unread small DATA frames. It is not needed, because no frame stays
/// unread longer than a turn. The crate
/// also charges frames that arrive after their stream was reset, and never credits them. After many
/// early responses to uploads, it would close the connection for frames that the client sent before
/// it saw the response. [`ReceiveBuffers::discarded_bytes`] bounds those frames instead.
pub const DATA_FRAME_BUDGET: usize = usize::MAX;
/// Number of reset streams that a connection remembers, to ignore frames still in flight. On a
/// forgotten stream each such frame is an error.
pub const MAX_REMEMBERED_RESETS: usize = 1024;
/// How long reset streams are remembered: a slow peer may have seconds of data in flight.
pub const RESET_MEMORY: Duration = Duration::from_secs(10);
/// Chunks of at least this size are kept as they are. The h2 crate slices them from blocks of up to
/// 16 KiB.
const MERGE_BELOW: usize = 4 * 1024;
/// The size up to which small chunks are merged.
const MAX_MERGED_BYTES: usize = 16 * 1024;

/// The receive buffers of one connection.
#[derive(Debug, Default)]
pub struct ReceiveBuffers {
    read_bytes: Cell<usize>,
    read_frames: Cell<usize>,
    /// The streams that received DATA in this turn: at most `TURN_FRAMES`.
    arrived_on: RefCell<Vec<u32>>,
    shared: Rc<Shared>,
}

/// State of one connection that its receive buffers use, too.
#[derive(Debug, Default)]
struct Shared {
    open: RefCell<HashMap<u32, Weak<RefCell<Buffered>>>>,
    /// Bytes of DATA on the wire, without padding.
    arrived_bytes: Cell<u64>,
    /// The part of `arrived_bytes` that reached a receive buffer.
    received_bytes: Cell<u64>,
    /// Buffers that were dropped before their data had ended.
    unfinished: Cell<u64>,
}

/// The received data of one stream.
#[derive(Debug)]
pub struct ReceiveBuffer(Rc<RefCell<Buffered>>);

#[derive(Debug)]
struct Buffered {
    stream: RecvStream,
    shared: Rc<Shared>,
    chunks: VecDeque<Bytes>,
    /// After `chunks`: either the last chunk as received, or several small ones merged. Never both.
    last: Bytes,
    merged: BytesMut,
    /// Set when the data has ended or failed.
    end: Option<Result<(), h2::Error>>,
    /// The reading task, and whether it waits for data.
    reader: Waker,
    is_awaited: bool,
}

impl ReceiveBuffers {
    /// Creates the buffer of a received stream.
    pub fn open(&self, stream: RecvStream) -> ReceiveBuffer {
        let id = stream.stream_id().as_u32();
        let mut buffered = Buffered {
            stream,
            shared: Rc::clone(&self.shared),
            chunks: VecDeque::new(),
            last: Bytes::new(),
            merged: BytesMut::new(),
            end: None,
            reader: Waker::noop().clone(),
            is_awaited: false,
        };
        // earlier turns have left it in the h2 crate
        buffered.fill();
        let buffered = Rc::new(RefCell::new(buffered));
        let mut open = self.shared.open.borrow_mut();
        open.insert(id, Rc::downgrade(&buffered));
        ReceiveBuffer(buffered)
    }

    /// Whether the connection may be read in this turn. If not, [`end_turn`](Self::end_turn) wakes
    /// its task.
    fn may_read(&self) -> bool {
        self.read_bytes.get() < TURN_BYTES && self.read_frames.get() < TURN_FRAMES
    }

    /// Counts bytes that were read from the connection.
    fn read(&self, bytes: usize) {
        self.read_bytes.set(self.read_bytes.get() + bytes);
    }

    /// Counts a frame among the bytes read.
    fn frame_arrived(&self, frame: &FrameHead) {
        match frame.kind {
            FrameHead::DATA => {
                let content = u64::from(frame.content_bytes());
                add(&self.shared.arrived_bytes, content);
                let mut arrived_on = self.arrived_on.borrow_mut();
                if arrived_on.last() != Some(&frame.stream) {
                    arrived_on.push(frame.stream);
                }
            }
            FrameHead::HEADERS => {}
            _ => return,
        }
        self.read_frames.set(self.read_frames.get() + 1);
    }

    /// Bytes of DATA that reached no receive buffer by the end of a turn, because their streams had
    /// been answered or reset.
    pub fn discarded_bytes(&self) -> u64 {
        let arrived = self.shared.arrived_bytes.get();
        arrived.saturating_sub(self.shared.received_bytes.get())
    }

    /// The number of streams that stopped being read before their data had ended. On each, a peer
    /// that respects flow control can have one window of data in flight.
    pub fn unfinished_streams(&self) -> u64 {
        self.shared.unfinished.get()
    }

    /// Fills the receive buffers and lets the readers run before the next turn. The task that
    /// drives the connection must call it when the connection has nothing more to do. Returns
    /// whether a turn has ended.
    pub fn end_turn(&self, cx: &Context<'_>) -> bool {
        if self.may_read() {
            return false;
        }
        self.read_bytes.set(0);
        self.read_frames.set(0);
        for stream in self.arrived_on.borrow_mut().drain(..) {
            let buffer = self
                .shared
                .open
                .borrow()
                .get(&stream)
                .and_then(Weak::upgrade);
            if let Some(buffer) = buffer {
                buffer.borrow_mut().fill();
            }
        }
        cx.waker().wake_by_ref();
        true
    }
}

fn add(total: &Cell<u64>, count: u64) {
    total.set(total.get().saturating_add(count));
}

impl ReceiveBuffer {
    /// The next bytes; `None` at the end of the data. Credits the peer's flow-control window for
    /// the returned bytes.
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

    /// The trailers. Call it after the data has ended.
    pub fn poll_trailers(
        &self,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Option<HeaderMap>, h2::Error>> {
        self.0.borrow_mut().stream.poll_trailers(cx)
    }

    /// Whether all data was taken and there are no trailers.
    pub fn is_end_stream(&self) -> bool {
        let this = self.0.borrow();
        this.is_empty() && !matches!(this.end, Some(Err(_))) && this.stream.is_end_stream()
    }
}

impl Buffered {
    fn is_empty(&self) -> bool {
        self.chunks.is_empty() && self.last.is_empty() && self.merged.is_empty()
    }

    /// Takes all data that has arrived. Later data wakes the reader if it waits.
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
        add(&self.shared.received_bytes, data.len() as u64);
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
        // fails only if the stream is gone, which the next read reports
        let _ = self.stream.flow_control().release_capacity(bytes);
    }
}

impl Drop for Buffered {
    /// Credits unread bytes, which still count in the connection's window.
    fn drop(&mut self) {
        let id = self.stream.stream_id().as_u32();
        self.shared.open.borrow_mut().remove(&id);
        if self.end.is_none() && !self.stream.is_end_stream() {
            add(&self.shared.unfinished, 1);
        }
        let chunks: usize = self.chunks.iter().map(Bytes::len).sum();
        self.credit(chunks + self.last.len() + self.merged.len());
    }
}
