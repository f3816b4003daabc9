//! One bound for all request bodies that are read ahead in this process.
//!
//! A limit that is keyed by a field of the body makes the gateway hold the body before it decides. How many clients do that at
//! once is for the clients to choose, so all of these bodies share `server.max_body_buffer`. Memory is counted by what was
//! allocated, from before it is allocated until it is freed, which is when the body has been written to the upstream. One client
//! address may use a part of it only, so that it cannot keep the bodies of all others out. The lock is taken when a buffer grows or
//! is freed, never for a request whose body is not read ahead.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
};

use bytes::Bytes;
use ipnet::IpNet;

/// The smallest buffer: most forms fit.
const MIN_BYTES: usize = 4 * 1024;
/// One client address may use this part of what the others leave. So twenty addresses that take all they can get, one after the
/// other, still leave a fifteenth of all.
const CLIENT_PART: usize = 8;
/// A smaller bound is treated like this one, so that a body of the largest size has room while it grows.
const CLIENT_MIN_OF_BYTES: usize = 8 * 1024 * 1024;

/// How much memory bodies that are read ahead use, and may use.
#[derive(Debug)]
pub struct BodyBuffers {
    max_bytes: AtomicUsize,
    used_bytes: AtomicUsize,
    /// The most that was used since [`take_peak`](Self::take_peak).
    peak_bytes: AtomicUsize,
    refused: AtomicU64,
    /// By client address; no more of them than buffers.
    clients: Mutex<HashMap<IpNet, usize>>,
}

impl BodyBuffers {
    /// With this bound on all of them.
    pub fn new(max_bytes: usize) -> Arc<Self> {
        Arc::new(Self {
            max_bytes: AtomicUsize::new(max_bytes),
            used_bytes: AtomicUsize::new(0),
            peak_bytes: AtomicUsize::new(0),
            refused: AtomicU64::new(0),
            clients: Mutex::default(),
        })
    }

    /// Another bound. What is used already stays.
    pub fn set_max(&self, max_bytes: usize) {
        self.max_bytes.store(max_bytes, Relaxed);
    }

    /// Bytes allocated now.
    pub fn used(&self) -> usize {
        self.used_bytes.load(Relaxed)
    }

    /// Bodies that found no room so far.
    pub fn refused(&self) -> u64 {
        self.refused.load(Relaxed)
    }

    /// The most that was used since this was last asked.
    pub fn take_peak(&self) -> usize {
        self.peak_bytes.swap(self.used(), Relaxed)
    }

    fn reserve(&self, client: IpNet, bytes: usize) -> bool {
        let max = self.max_bytes.load(Relaxed);
        let mut clients = self.clients();
        let held = clients.get(&client).copied().unwrap_or_default();
        let others = self.used().saturating_sub(held);
        let left = max.max(CLIENT_MIN_OF_BYTES).saturating_sub(others);
        let held = held.saturating_add(bytes);
        let is_in_part = held <= left / CLIENT_PART;
        let add = |used: usize| used.checked_add(bytes).filter(|used| *used <= max);
        let before = match is_in_part {
            true => self.used_bytes.fetch_update(Relaxed, Relaxed, add).ok(),
            false => None,
        };
        let Some(before) = before else {
            self.refused.fetch_add(1, Relaxed);
            return false;
        };
        clients.insert(client, held);
        self.peak_bytes.fetch_max(before + bytes, Relaxed);
        true
    }

    fn release(&self, client: IpNet, bytes: usize) {
        if bytes == 0 {
            return;
        }
        let mut clients = self.clients();
        self.used_bytes.fetch_sub(bytes, Relaxed);
        if let Some(held) = clients.get_mut(&client) {
            *held = held.saturating_sub(bytes);
            if *held == 0 {
                clients.remove(&client);
            }
        }
    }

    fn clients(&self) -> MutexGuard<'_, HashMap<IpNet, usize>> {
        self.clients.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One body, as much of it as was read: its pieces in one buffer, however small they came.
#[derive(Debug)]
pub(super) struct BodyBuffer {
    bytes: Vec<u8>,
    /// As counted; at least the buffer's capacity.
    reserved: usize,
    client: IpNet,
    all: Arc<BodyBuffers>,
}

impl BodyBuffer {
    /// Allocates nothing.
    pub(super) fn new(all: &Arc<BodyBuffers>, client: IpNet) -> Self {
        Self {
            bytes: Vec::new(),
            reserved: 0,
            client,
            all: Arc::clone(all),
        }
    }

    pub(super) fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Copies a piece behind what is there. `false` where the bound on all bodies, or on those of the client, leaves no room.
    #[must_use]
    pub(super) fn append(&mut self, piece: &[u8]) -> bool {
        let needed = self.bytes.len().saturating_add(piece.len());
        if needed > self.bytes.capacity() {
            let capacity = needed.next_power_of_two().max(MIN_BYTES);
            // old and new buffer are both there while one is copied into the other
            if !self.all.reserve(self.client, capacity) {
                return false;
            }
            let mut larger = Vec::with_capacity(capacity);
            larger.extend_from_slice(&self.bytes);
            self.bytes = larger;
            self.all.release(self.client, self.reserved);
            self.reserved = capacity;
        }
        self.bytes.extend_from_slice(piece);
        true
    }

    /// What was read. It counts for as long as any part of it is held.
    pub(super) fn freeze(self) -> Bytes {
        match self.bytes.is_empty() {
            true => Bytes::new(),
            false => Bytes::from_owner(self),
        }
    }
}

impl AsRef<[u8]> for BodyBuffer {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for BodyBuffer {
    fn drop(&mut self) {
        self.all.release(self.client, self.reserved);
    }
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr};

    use super::*;

    fn client(number: u8) -> IpNet {
        IpAddr::V4(Ipv4Addr::new(192, 0, 2, number)).into()
    }

    #[test]
    fn one_client_cannot_take_the_room_of_all_others() {
        let all = BodyBuffers::new(64 << 20);
        let fill = |number| {
            let mut buffers = Vec::new();
            loop {
                let mut buffer = BodyBuffer::new(&all, client(number));
                if !buffer.append(&[0; 16 * 1024]) {
                    return buffers;
                }
                buffers.push(buffer);
            }
        };
        let hoarded = fill(1);
        assert_eq!((hoarded.len(), all.used()), (512, 8 << 20));
        let other = fill(2);
        assert_eq!(other.len(), 448, "an eighth of what the first left");
        drop(hoarded);
        assert_eq!((all.used(), all.clients().len()), (7 << 20, 1));
    }

    #[test]
    fn many_clients_cannot_take_the_room_of_one_who_comes_later() {
        let all = BodyBuffers::new(64 << 20);
        let mut hoarded = Vec::new();
        for number in 1..=20 {
            loop {
                let mut buffer = BodyBuffer::new(&all, client(number));
                if !buffer.append(&[0; 4096]) {
                    break;
                }
                hoarded.push(buffer);
            }
        }
        let left = (64 << 20) - all.used();
        assert!((4 << 20..5 << 20).contains(&left), "{left} bytes are left");
        let mut late = BodyBuffer::new(&all, client(21));
        assert!(late.append(&[0; 64 * 1024]));
    }

    #[test]
    fn pieces_are_joined_and_counted_by_what_they_take() {
        let all = BodyBuffers::new(64 * 1024);
        let mut buffer = BodyBuffer::new(&all, client(1));
        for byte in 0..10_000_u32 {
            assert!(buffer.append(&[byte as u8]));
        }
        assert_eq!((buffer.len(), all.used()), (10_000, 16 * 1024));
        let bytes = buffer.freeze();
        let part = bytes.slice(9_999..);
        drop(bytes);
        assert_eq!(all.used(), 16 * 1024, "a part keeps all of it");
        assert_eq!(part[..], [9_999_u32 as u8]);
        drop(part);
        assert_eq!(all.used(), 0);
        assert_eq!(all.take_peak(), 24 * 1024, "while it grew from 8 to 16");
        assert_eq!(all.take_peak(), 0);
    }

    #[test]
    fn all_bodies_share_one_bound() {
        let all = BodyBuffers::new(8 * 1024);
        let mut one = BodyBuffer::new(&all, client(1));
        let mut other = BodyBuffer::new(&all, client(1));
        assert!(one.append(b"a") && other.append(b"b"));
        assert!(!other.append(&[0; 4096]), "it would need 8 KiB more");
        assert_eq!((other.len(), all.used(), all.refused()), (1, 8192, 1));
        drop(one);
        assert!(!other.append(&[0; 4096]), "still: both buffers count");
        all.set_max(16 * 1024);
        assert!(other.append(&[0; 4096]));
        assert_eq!(other.freeze().len(), 4097);
        assert_eq!(all.used(), 0);
    }

    #[test]
    fn a_body_without_a_byte_takes_nothing() {
        let all = BodyBuffers::new(0);
        let mut buffer = BodyBuffer::new(&all, client(1));
        assert!(buffer.append(&[]));
        assert!(buffer.freeze().is_empty());
        assert_eq!(all.used(), 0);
    }
}
