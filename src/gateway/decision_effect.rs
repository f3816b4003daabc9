//! Whether a decision charges limits and is recorded.

/// The side effects of a decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DecisionEffect {
    /// The gateway serves the request: limits are charged, and it counts as in flight.
    Serve,
    /// Another proxy serves the request: limits are charged.
    Charge,
    /// None: no limit is charged and nothing is recorded.
    Look,
}

impl DecisionEffect {
    pub(super) fn charges(self) -> bool {
        self != Self::Look
    }
}
