//! Request ids: ours, or those of a trusted proxy.

use std::{
    cell::{Cell, RefCell},
    time::SystemTime,
};

use bytes::{BufMut as _, BytesMut};
use http::{HeaderMap, HeaderValue};

use crate::{identity::Client, response::X_REQUEST_ID};

/// Generates request ids: a random start per worker, then a counter, mixed so that ids look
/// unrelated. Ids are unique, not secret.
#[derive(Debug)]
pub(super) struct RequestIds {
    start: u64,
    /// `start` in hexadecimal; every id begins with it.
    prefix: [u8; 16],
    count: Cell<u64>,
    /// Ids are slices of this buffer. One long-lived id keeps the whole buffer alive, so it is
    /// small.
    buffer: RefCell<BytesMut>,
}

/// Room for 32 ids.
const IDS_BYTES: usize = 1024;

impl RequestIds {
    pub(super) fn new() -> Self {
        let mut random = [0; 16];
        if getrandom::fill(&mut random).is_err() {
            // Without entropy, the start time distinguishes this worker from others.
            random = SystemTime::UNIX_EPOCH
                .elapsed()
                .unwrap_or_default()
                .as_nanos()
                .to_le_bytes();
        }
        let (start, count) = random.split_at(8);
        let number = |bytes: &[u8]| {
            bytes
                .iter()
                .fold(0, |number, &byte| number << 8 | u64::from(byte))
        };
        let start = number(start);
        Self {
            start,
            prefix: hexadecimal(start),
            count: Cell::new(number(count)),
            buffer: RefCell::default(),
        }
    }

    /// A number that differs between workers.
    pub(super) fn random(&self) -> u64 {
        mix(self.start ^ self.count.get())
    }

    /// The next pseudo-random number, for uses where guessing it gains nothing.
    pub(super) fn draw(&self) -> u64 {
        let count = self.count.get().wrapping_add(1);
        self.count.set(count);
        mix(mix(self.start) ^ count)
    }

    /// The next id: 32 hexadecimal digits.
    pub(super) fn next(&self) -> HeaderValue {
        let count = self.count.get().wrapping_add(1);
        self.count.set(count);
        let mut buffer = self.buffer.borrow_mut();
        if buffer.capacity() < 32 {
            buffer.reserve(IDS_BYTES);
        }
        buffer.put_slice(&self.prefix);
        buffer.put_slice(&hexadecimal(mix(count)));
        let id = HeaderValue::from_maybe_shared(buffer.split().freeze());
        id.unwrap_or(HeaderValue::from_static("0"))
    }
}

fn hexadecimal(number: u64) -> [u8; 16] {
    std::array::from_fn(|place| b"0123456789abcdef"[(number >> (60 - 4 * place)) as usize & 15])
}

/// The SplitMix64 finaliser: a bijection, so distinct counts give distinct ids.
fn mix(count: u64) -> u64 {
    let count = (count ^ (count >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let count = (count ^ (count >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    count ^ (count >> 31)
}

/// The request id that a trusted proxy sent, if it is short and printable.
pub(super) fn trusted_request_id(client: &Client<'_>, headers: &HeaderMap) -> Option<HeaderValue> {
    const MAX_BYTES: usize = 128;
    let theirs = client
        .peer_trusted
        .then(|| headers.get(&X_REQUEST_ID))
        .flatten()?;
    let fits = (1..=MAX_BYTES).contains(&theirs.len())
        && theirs.as_bytes().iter().all(u8::is_ascii_graphic);
    fits.then(|| theirs.clone())
}
