//! Core: which policy applies to a request.

pub mod pattern;

pub use pattern::Pattern;
