//! What a call asks and reports, and what its reply changes.

use super::{
    forecast::Forecast,
    memory::Recollection,
    reply::Reply,
    requests::Requests,
    terms::{LeaseAlgorithm, LeaseTerms},
};

/// Local tokens, by generation modulo 2.
pub type TokenPair = [u64; 2];

/// One report entry: what happened to tokens of one generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeaseReport {
    /// Spent; if negative, tokens granted to a request that went back into the cell.
    Spent {
        /// The generation of the tokens.
        generation: u32,
        /// The number of tokens.
        tokens: i64,
    },
    /// Returned.
    Returned {
        /// The generation of the tokens.
        generation: u32,
        /// The number of tokens.
        tokens: u64,
    },
    /// Granted by a bucket to a request that did not use them. The bucket takes back what it has
    /// not refilled since.
    Unused {
        /// The number of tokens.
        tokens: u64,
        /// The grant that they came from.
        origin: Origin,
    },
    /// Still leased from a generation that the store forgot in a loss.
    Out {
        /// The generation of the tokens.
        generation: u32,
        /// The number of tokens.
        tokens: u64,
    },
    /// Admitted without the store; must be charged.
    Debt {
        /// The number of tokens.
        tokens: u64,
        /// Their window, if known: a debt to a window that is over lapses.
        window: Option<u32>,
    },
    /// Charged after an answer, as far as tokens are left.
    Charge {
        /// The number of tokens.
        tokens: u64,
    },
    /// Reserved in a bucket for a request that cost less.
    Refund {
        /// The number of tokens.
        tokens: u64,
    },
}

/// The grant that a request's units came from, needed to return them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Origin {
    /// A bucket's generation, a window's number, or a log's call.
    pub generation: u32,
    /// Bucket: its room at the grant and the total returned until then, packed by the store.
    pub room: u64,
    /// Bucket: how much of the generation had passed.
    pub moment_us: u64,
}

impl Origin {
    pub(super) fn of(terms: &LeaseTerms, reply: &Reply) -> Origin {
        let [_, room] = reply.state;
        // tokens granted ahead are valid until the end of the next generation
        let both_us = terms.generation_us().saturating_mul(2);
        let (room, moment_us) = match terms.algorithm {
            LeaseAlgorithm::Bucket => (room, both_us.saturating_sub(reply.valid_us)),
            _ => (0, 0),
        };
        Origin {
            generation: reply.generation,
            room,
            moment_us,
        }
    }
}

/// The reason for a call.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CallReason {
    /// The waiting requests.
    pub need: Requests,
    /// Tokens withdrawn from the cell to be returned.
    pub back: TokenPair,
    /// Whether to request tokens ahead, too.
    pub fill: bool,
}

/// The content of one call.
#[derive(Clone, Debug, PartialEq)]
pub struct LeaseCall {
    /// The waiting requests.
    pub need: Requests,
    /// Most tokens ahead: a multiple of `unit`.
    pub want: u64,
    /// The cost of the cheapest request that the tokens ahead are for; fewer serve no request.
    pub unit: u64,
    /// The share of the remaining pool that may be taken ahead.
    pub part: f64,
    /// Requests since the last call.
    pub arrivals: u64,
    /// Requests per second at this gateway.
    pub rate: f64,
    /// Time since the last call; 0 for the first.
    pub since_us: u64,
    /// The memory of the store's demand estimate.
    pub memory_us: u64,
    /// The key's last known state, for a store that has lost data.
    pub memory: Recollection,
    /// The fate of tokens since the last call.
    pub reports: Vec<LeaseReport>,
}

/// The effect of a reply on the cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Granted {
    /// Generation modulo 2.
    pub slot: usize,
    /// The deadline of these tokens, in this gateway's nanoseconds.
    pub deadline_ns: u64,
    /// Tokens to put into the cell.
    pub bank: u64,
    /// Older tokens in this slot have expired and must be replaced.
    pub replaces: bool,
    /// The store has lost data of the key since the last reply.
    pub is_lost: bool,
    /// The grant to which unused units return.
    pub origin: Origin,
    /// The store's future content.
    pub forecast: Forecast,
    /// A pause in which Redis is not asked although requests might fit.
    pub pause: Option<Pause>,
}

/// A pause between two calls: requests that cost `least` or more are refused meanwhile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pause {
    /// When it ends.
    pub until_ns: u64,
    /// Redis is still asked for cheaper requests.
    pub least: u64,
}
