//! The name of one bucket.

/// Identifies one bucket: a keyed 128-bit hash of its sharing attributes. The secret key prevents
/// targeted collisions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Key(pub u128);

/// Most limits that may apply to one request (checked when a configuration is compiled).
pub const MAX_LIMITS: usize = 16;
