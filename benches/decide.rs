//! The decision alone: nanoseconds and allocations.

fn main() {}
