//! Validated settings: the Redis servers, and the limits that gateways share.

use std::{
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::Duration,
};

use sha2::{Digest, Sha256};

use super::{
    lease::{LeaseAlgorithm, LeaseTerms},
    loss::Loss,
    redis::{Failure, RedisTarget},
};
use crate::{limit::Key, telemetry::handles::LeaseMetrics};

/// `[redis]`.
#[derive(Clone, Debug)]
pub struct RedisSettings {
    /// The address.
    pub target: RedisTarget,
    /// Prefix of every key in Redis.
    pub key_prefix: String,
    /// The longest time for which a request waits for Redis.
    pub timeout: Duration,
    /// The longest time for opening a connection.
    pub connect_timeout: Duration,
    /// This region's part of every shared limit, if each region has its own Redis; more than 0, at
    /// most 1.
    pub region_share: f64,
}

/// How strictly gateways enforce a shared limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sync {
    /// Tokens are leased ahead.
    Lease,
    /// Redis is asked for every request.
    Strict,
}

/// A limit's behaviour while Redis does not answer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum WhenDown {
    /// The gateway enforces this part of the limit locally.
    Local {
        /// More than 0, at most 1.
        fraction: f64,
    },
    /// It admits everything.
    Open,
    /// It admits nothing: 503.
    Closed,
}

impl WhenDown {
    /// The configuration's word for it.
    pub fn as_str(self) -> &'static str {
        match self {
            WhenDown::Local { .. } => "local",
            WhenDown::Open => "open",
            WhenDown::Closed => "closed",
        }
    }
}

/// Labels of the metric for failed calls.
pub const FAILURES: [&str; Failure::ALL.len()] = {
    let mut labels = [""; Failure::ALL.len()];
    let mut index = 0;
    while index < labels.len() {
        labels[index] = Failure::ALL[index].label();
        index += 1;
    }
    labels
};

/// Labels of the metric for lost data.
pub const LOSSES: [&str; 3] = Loss::LABELS;

/// A limit that gateways share.
#[derive(Debug)]
pub struct SharedLimit {
    pub(super) name: String,
    /// One per quota.
    pub(super) tiers: Vec<SharedTier>,
    pub(super) when_down: WhenDown,
    /// The part by which the limit may be exceeded, so that keys new to a gateway need no call; 0
    /// to 0.1.
    pub(super) slack: f64,
    /// The key of the single bucket for requests without a key.
    pub(super) unkeyed: Key,
    pub(super) metrics: LeaseMetrics,
    /// Whether gateways disagree on it.
    pub(super) disagreement: Disagreement,
}

/// Detects gateways that count the same keys with other terms, during a reload or permanently.
#[derive(Debug, Default)]
pub(super) struct Disagreement {
    /// When it was first seen in the present series of sightings, and when last; 0: never.
    since_ns: AtomicU64,
    seen_ns: AtomicU64,
}

/// A change on all gateways is seen only briefly. After this long it is a disagreement, which ends
/// when it has not been seen for the same time.
const DISAGREES_NS: u64 = 2_000_000_000;
const AGREES_NS: u64 = 60_000_000_000;

impl Disagreement {
    /// Records a sighting.
    pub(super) fn seen(&self, now_ns: u64) {
        if !self.is_recent(now_ns) {
            self.since_ns.store(now_ns, Relaxed);
        }
        self.seen_ns.store(now_ns, Relaxed);
    }

    fn is_recent(&self, now_ns: u64) -> bool {
        let seen_ns = self.seen_ns.load(Relaxed);
        seen_ns != 0 && now_ns.saturating_sub(seen_ns) < AGREES_NS
    }

    /// Whether it is a lasting disagreement.
    pub(super) fn lasts(&self, now_ns: u64) -> bool {
        let seen_ns = self.seen_ns.load(Relaxed);
        let lasted_ns = seen_ns.saturating_sub(self.since_ns.load(Relaxed));
        self.is_recent(now_ns) && lasted_ns >= DISAGREES_NS
    }
}

/// One quota of a shared limit.
#[derive(Debug, PartialEq)]
pub(super) struct SharedTier {
    pub(super) terms: LeaseTerms,
    /// Index of its overflow cell: the tiers before it, over all limits.
    pub(super) overflow: usize,
}

/// A bucket's identity, the same at all gateways.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SharedKeyName(pub [u8; 16]);

impl SharedKeyName {
    /// The common name of keys without a cell.
    pub(super) const OVERFLOW: SharedKeyName = SharedKeyName(*b"(no room for it)");
}

impl SharedLimit {
    /// A limit with these terms: at least one, one per quota. `before` is the number of quotas of
    /// the limits before it, because each quota has its own overflow cell.
    pub fn new(
        name: &str,
        terms: Vec<LeaseTerms>,
        when_down: WhenDown,
        before: usize,
        metrics: LeaseMetrics,
    ) -> SharedLimit {
        let digest: [u8; 32] = Sha256::digest(name).into();
        let unkeyed = digest
            .iter()
            .take(16)
            .fold(0, |key, &byte| key << 8 | u128::from(byte));
        let tier = |(index, terms)| SharedTier {
            terms,
            overflow: before + index,
        };
        SharedLimit {
            name: name.to_owned(),
            tiers: terms.into_iter().enumerate().map(tier).collect(),
            when_down,
            slack: 0.0,
            unkeyed: Key(unkeyed),
            metrics,
            disagreement: Disagreement::default(),
        }
    }

    /// Allows the limit to be exceeded by this part, 0 to 0.1.
    pub fn with_slack(self, slack: f64) -> SharedLimit {
        SharedLimit { slack, ..self }
    }

    /// Whether both are the same limit with the same terms, at the same index.
    pub fn is_like(&self, other: &SharedLimit) -> bool {
        self.name == other.name
            && self.tiers == other.tiers
            && self.when_down == other.when_down
            && self.slack == other.slack
    }

    /// The terms of a tier, or of the default tier if it does not exist.
    pub(super) fn tier(&self, tier: usize) -> &SharedTier {
        self.tiers.get(tier).unwrap_or(&self.tiers[0])
    }

    /// Most units available at once under a quota.
    pub fn capacity(&self, tier: usize) -> u64 {
        self.tier(tier).terms.capacity
    }

    /// The algorithm, equal in every tier.
    pub(super) fn algorithm(&self) -> LeaseAlgorithm {
        self.tier(0).terms.algorithm
    }

    /// The number of quotas.
    pub fn quotas(&self) -> usize {
        self.tiers.len()
    }

    /// The key in Redis of one bucket. The braced part selects the cluster slot. The hash excludes
    /// the algorithm, so a limit with a new algorithm continues from what was spent. Slots are
    /// separate, because they are no debt to any other algorithm.
    pub(super) fn redis_key(
        &self,
        prefix: &str,
        terms: &LeaseTerms,
        name: SharedKeyName,
    ) -> String {
        let form = match terms.algorithm {
            LeaseAlgorithm::Slots => (4, 0),
            _ => (0, 0),
        };
        self.key_of(prefix, form, name)
    }

    /// The key in older versions, if it differed.
    pub(super) fn former_key(
        &self,
        prefix: &str,
        terms: &LeaseTerms,
        name: SharedKeyName,
    ) -> Option<String> {
        let form = match terms.algorithm {
            LeaseAlgorithm::Bucket => (1, 0),
            LeaseAlgorithm::Fixed | LeaseAlgorithm::Sliding => (2, terms.span_us),
            LeaseAlgorithm::Log => (3, terms.span_us),
            LeaseAlgorithm::Slots => return None,
        };
        Some(self.key_of(prefix, form, name))
    }

    fn key_of(&self, prefix: &str, form: (u8, u64), name: SharedKeyName) -> String {
        let digest = Sha256::new()
            .chain_update([form.0])
            .chain_update(form.1.to_le_bytes())
            .chain_update(name.0)
            .finalize();
        let hash = base64url(digest.iter().copied().take(16));
        format!("{prefix}:{{{}:{hash}}}", self.name)
    }
}

/// RFC 4648 §5, without padding.
fn base64url(bytes: impl Iterator<Item = u8>) -> String {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
    let mut text = String::new();
    let (mut held, mut bits) = (0_u32, 0);
    let mut push = |index: u32| text.push(char::from(ALPHABET[index as usize & 63]));
    for byte in bytes {
        held = held << 8 | u32::from(byte);
        bits += 8;
        while bits >= 6 {
            bits -= 6;
            push(held >> bits);
        }
    }
    if bits > 0 {
        push(held << (6 - bits));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gateways_disagree_when_they_differ_for_longer_than_a_reload_takes() {
        let (disagreement, second) = (Disagreement::default(), 1_000_000_000);
        disagreement.seen(second);
        disagreement.seen(2 * second);
        assert!(!disagreement.lasts(2 * second), "a reload");
        disagreement.seen(4 * second);
        assert!(disagreement.lasts(4 * second));
        assert!(!disagreement.lasts(64 * second), "they agree again");
    }

    #[test]
    fn base64url_is_that_of_the_rfc() {
        let of = |text: &str| base64url(text.bytes());
        assert_eq!(
            [of("f"), of("fo"), of("foo"), of("foobar")],
            ["Zg", "Zm8", "Zm9v", "Zm9vYmFy"]
        );
        assert_eq!(base64url([0xfb, 0xff].into_iter()), "-_8");
    }
}
