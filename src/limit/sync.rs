//! What the table is made of: the system's atomics and locks. The model of the table puts others in their place.

pub(super) use std::{
    sync::{Mutex, atomic::AtomicU64},
    thread::yield_now,
};

use zerocopy::FromZeros;

/// So many zeros, which the system backs with memory once they are touched. Ends the process when there is no address
/// space for them, as every allocation does.
pub(super) fn zeroed(length: usize) -> Box<[AtomicU64]> {
    FromZeros::new_box_zeroed_with_elems(length).unwrap_or_else(|_| {
        let layout = std::alloc::Layout::array::<AtomicU64>(length)
            .unwrap_or(std::alloc::Layout::new::<u64>());
        std::alloc::handle_alloc_error(layout)
    })
}
