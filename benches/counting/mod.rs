//! Counts the bytes allocated, and the allocations of each thread.
#![expect(
    unsafe_code,
    reason = "GlobalAlloc is an unsafe trait; every call goes to the system's allocator unchanged"
)]

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
    sync::atomic::{AtomicUsize, Ordering::Relaxed},
};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

static BYTES: AtomicUsize = AtomicUsize::new(0);
static ALLOCATIONS_OF_ALL: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

/// Allocations of this thread so far.
#[allow(dead_code, reason = "not every benchmark uses it")]
pub(super) fn allocations() -> u64 {
    ALLOCATIONS.with(Cell::get)
}

/// Allocations of all threads so far.
#[allow(dead_code, reason = "not every benchmark uses it")]
pub(super) fn allocations_of_all() -> usize {
    ALLOCATIONS_OF_ALL.load(Relaxed)
}

/// Bytes that all threads hold.
#[allow(dead_code, reason = "not every benchmark uses it")]
pub(super) fn held() -> usize {
    BYTES.load(Relaxed)
}

struct Counting;

fn count(bytes: usize) {
    BYTES.fetch_add(bytes, Relaxed);
    ALLOCATIONS_OF_ALL.fetch_add(1, Relaxed);
    ALLOCATIONS.with(|allocations| allocations.set(allocations.get() + 1));
}

// SAFETY: every call is forwarded with its contract unchanged
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size);
        BYTES.fetch_sub(layout.size(), Relaxed);
        unsafe { System.realloc(pointer, layout, size) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        BYTES.fetch_sub(layout.size(), Relaxed);
        unsafe { System.dealloc(pointer, layout) }
    }
}
