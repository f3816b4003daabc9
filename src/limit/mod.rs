//! Core: may it pass, and if not, when. Counts keys; knows neither clients nor routes, and is handed the time.

pub mod quota;

pub use quota::Quota;

/// The identity of one bucket: a keyed 128-bit hash of whatever shares it, so nobody can aim a collision.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Key(pub u128);

/// The most limits that one request may meet (checked when a configuration is compiled).
pub const MAX_LIMITS: usize = 16;

/// How a limit counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Algorithm {
    /// Token bucket, kept as GCRA: one timestamp per key.
    TokenBucket,
}
