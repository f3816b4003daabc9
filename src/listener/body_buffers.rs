//! Process-wide memory bound for request bodies that the gateway buffers.
//!
//! A limit keyed by a body field makes the gateway buffer the body before it decides. Clients
//! choose how many of these requests run at once, so all buffered bodies share
//! `server.max_body_buffer`. Memory is counted as allocated: from before the allocation until the
//! free, which follows the write to the upstream. One client address may use only a part of it, so
//! it cannot lock out the bodies of other clients. The lock is taken when a buffer grows or is
//! freed. A request with an unbuffered body never takes it.

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
/// One client address may use this fraction of the memory that the others leave free. If twenty
/// addresses in turn take all they can, a fifteenth of the total stays free.
const CLIENT_PART: usize = 8;
/// Smaller totals count as this value in the per-client bound, so that a body of the largest size
/// still fits while its buffer grows.
const CLIENT_MIN_OF_BYTES: usize = 8 * 1024 * 1024;

/// Memory in use by buffered request bodies, and its bounds.
#[derive(Debug)]
pub struct BodyBuffers {
    max_bytes: AtomicUsize,
    used_bytes: AtomicUsize,
    /// Peak use since [`take_peak`](Self::take_peak).
    peak_bytes: AtomicUsize,
    refused: AtomicU64,
    /// Bytes in use by client network; never more entries than buffers.
    clients: Mutex<HashMap<IpNet, usize>>,
}

impl BodyBuffers {
    /// Bounds the total to `max_bytes`.
    pub fn new(max_bytes: usize) -> Arc<Self> {
        Arc::new(Self {
            max_bytes: AtomicUsize::new(max_bytes),
            used_bytes: AtomicUsize::new(0),
            peak_bytes: AtomicUsize::new(0),
            refused: AtomicU64::new(0),
            clients: Mutex::default(),
        })
    }

    /// Changes the total bound. Existing buffers stay.
    pub fn set_max(&self, max_bytes: usize) {
        self.max_bytes.store(max_bytes, Relaxed);
    }

    /// Bytes allocated now.
    pub fn used(&self) -> usize {
        self.used_bytes.load(Relaxed)
    }

    /// Bodies refused for lack of room so far.
    pub fn refused(&self) -> u64 {
        self.refused.load(Relaxed)
    }

    /// Returns the peak use since the last call, and restarts it at the current use.
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

/// One buffered body: the bytes read so far, contiguous in one buffer.
#[derive(Debug)]
pub(super) struct BodyBuffer {
    bytes: Vec<u8>,
    /// Bytes counted against the bound; at least the buffer's capacity.
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

    /// Appends a copy of `piece`. `false` if the bound on all bodies, or on those of this client,
    /// leaves no room.
    #[must_use]
    pub(super) fn append(&mut self, piece: &[u8]) -> bool {
        let needed = self.bytes.len().saturating_add(piece.len());
        if needed > self.bytes.capacity() {
            let capacity = needed.next_power_of_two().max(MIN_BYTES);
            // both buffers exist while the old one is copied into the new one
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

    /// The bytes read. They count until the last reference to them is dropped.
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
