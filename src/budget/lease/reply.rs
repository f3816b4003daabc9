//! The store's reply to a call.

/// The store's reply.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Reply {
    /// Granted to the waiting requests.
    pub need: u64,
    /// Granted ahead.
    pub want: u64,
    /// The generation of the grant.
    pub generation: u32,
    /// How long tokens granted ahead stay valid.
    pub valid_us: u64,
    /// Whole tokens left.
    pub pool: u64,
    /// Time until the first refused request fits. If none was refused, time until there is a token;
    /// 0 if there is one.
    pub wait_us: u64,
    /// The incarnation of the key's state; it changes in a loss.
    pub incarnation: u16,
    /// Gateways with different terms count the same key.
    pub disagrees: bool,
    /// Requests of all gateways per 1000 s.
    pub demand: u64,
    /// Bucket: µs until it is full, and its room (see `Origin`). Window: the counts of this one
    /// and of the one before.
    pub state: [u64; 2],
}
