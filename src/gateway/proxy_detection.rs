//! Detects proxies missing from `trusted_proxies`. All clients of such a proxy share one bucket, so
//! a limit would hit innocent clients.
//!
//! Two signs: a forwarding header from an untrusted private address, and one key with nearly all of
//! a limit's traffic. Each is counted every time and logged once per process.

use http::{HeaderMap, HeaderName};

use super::{log_once::UNNAMED_PROXY, plan::LimitRule, worker::Worker};
use crate::{
    identity::{AddressSource, Client, address},
    limit::Key,
};

/// A worker samples the keys of one decision in this many. A prime, so that it matches no client's
/// rhythm.
const SAMPLED: u32 = 7;

static X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");

impl Worker {
    /// Checks for a forwarding header from a private address. Internet clients can forge the
    /// header, but a private peer is probably a proxy of ours.
    pub(super) fn check_peer(&self, client: &Client<'_>, headers: &HeaderMap) {
        let plan = &self.active.plan;
        let looks_like_one = !client.peer_trusted
            && plan.counts_addresses
            && address::is_private(client.peer)
            && *plan.managed.source() != AddressSource::None
            && headers.contains_key(&X_FORWARDED_FOR);
        if !looks_like_one {
            return;
        }
        plan.addresses.rejected(UNNAMED_PROXY);
        if self.active.process.unnamed_proxy.is_first() {
            tracing::warn!(
                peer = %client.peer,
                "an untrusted private address sends x-forwarded-for: if it is your load balancer, all its clients share one bucket; add it to client_ip.trusted_proxies"
            );
        }
    }

    /// Whether the current decision's keys are sampled.
    pub(super) fn samples_keys(&self) -> bool {
        self.decisions.get().is_multiple_of(SAMPLED)
    }

    /// Samples one key of a limit.
    pub(super) fn sample_key(&self, rule: &LimitRule, key: Key, readable: impl FnOnce() -> String) {
        let mut majorities = self.majorities.borrow_mut();
        let dominant = majorities
            .get_mut(rule.place)
            .is_some_and(|majority| majority.vote(key));
        if !dominant {
            return;
        }
        rule.metrics.dominant_keys.increment(1);
        if rule.dominant_key.is_first() {
            let hint = if rule.key.has_address() {
                "; if the address is a proxy's, add it to client_ip.trusted_proxies"
            } else {
                ""
            };
            tracing::warn!(
                limit = rule.name,
                key = readable(),
                "one key makes more than 80 % of the requests that this limit counts{hint}"
            );
        }
    }
}
