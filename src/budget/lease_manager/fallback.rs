//! What a gateway admits on its own while Redis does not answer.

use crate::budget::{key_table::FallbackBucket, lease::LeaseTerms, settings::WhenDown};

/// The fallback parameters of a gateway with this share of the demand, given the pool's last known
/// content.
pub(in crate::budget) fn alone(
    terms: &LeaseTerms,
    when_down: WhenDown,
    share: f64,
    pool: Option<f64>,
) -> Option<FallbackBucket> {
    let WhenDown::Local { fraction } = when_down else {
        return None;
    };
    let capacity = terms.capacity as f64;
    let pool = pool.unwrap_or(capacity);
    let part = fraction * share;
    Some(FallbackBucket {
        rate: part * terms.rate / 1e3,
        capacity: (part * capacity).max(1.0),
        level: (part * pool).max(pool.min(1.0)),
        shadow_rate: share * terms.rate / 1e3,
        shadow_missing: share * (capacity - pool),
    })
}

/// The most requests in flight for a gateway with this share of the limit on its own, at least one.
pub(in crate::budget) fn most_alone(
    terms: &LeaseTerms,
    when_down: WhenDown,
    share: f64,
) -> Option<u64> {
    let WhenDown::Local { fraction } = when_down else {
        return None;
    };
    let most = fraction * share * terms.capacity as f64;
    Some((most as u64).max(1))
}
