//! The atomics and locks of the table: the system's here, replaced in the table's model.

pub(super) use std::{
    sync::{Mutex, atomic::AtomicU64},
    thread::yield_now,
};

use zerocopy::FromZeros;

/// This many zeros, which the system backs with memory when they are touched. Aborts the process if
/// there is no address space.
pub(super) fn zeroed(length: usize) -> Box<[AtomicU64]> {
    FromZeros::new_box_zeroed_with_elems(length).unwrap_or_else(|_| {
        let layout = std::alloc::Layout::array::<AtomicU64>(length)
            .unwrap_or(std::alloc::Layout::new::<u64>());
        std::alloc::handle_alloc_error(layout)
    })
}
