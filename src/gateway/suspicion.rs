//! What looks like a proxy that nobody has named: then all of its clients share one bucket, and a limit hits the innocent.
//!
//! Two signs, each logged once for a process and counted every time: a forwarding header from a private address that is not
//! trusted, and one key that holds nearly all of a limit's traffic.

use http::{HeaderMap, HeaderName};

use super::{log_once::UNNAMED_PROXY, plan::LimitRule, worker::Worker};
use crate::{
    identity::{AddressSource, Client, address},
    limit::Key,
};

/// Of so many decisions of a worker the keys of one are looked at; a prime, so that no rhythm of clients hides behind it.
const SAMPLED: u32 = 7;

static X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");

impl Worker {
    /// A client on the internet may write what it likes; what comes from a private address was written by a proxy of ours.
    pub(super) fn suspect_peer(&self, client: &Client<'_>, headers: &HeaderMap) {
        let plan = &self.shared.plan;
        let looks_like_one = !client.peer_trusted
            && plan.counts_addresses
            && address::is_private(client.peer)
            && *plan.managed.source() != AddressSource::None
            && headers.contains_key(&X_FORWARDED_FOR);
        if !looks_like_one {
            return;
        }
        plan.addresses.rejected(UNNAMED_PROXY);
        if self.shared.process.unnamed_proxy.is_first() {
            tracing::warn!(
                peer = %client.peer,
                "x-forwarded-for comes from a private address that is not trusted: if that is your load balancer, all of its clients share one bucket; name it in client_ip.trusted_proxies"
            );
        }
    }

    /// Whether the keys of the decision at hand are looked at.
    pub(super) fn samples_keys(&self) -> bool {
        self.decisions.get().is_multiple_of(SAMPLED)
    }

    /// Looks at one key of a limit.
    pub(super) fn suspect_key(
        &self,
        rule: &LimitRule,
        key: Key,
        readable: impl FnOnce() -> String,
    ) {
        let mut majorities = self.majorities.borrow_mut();
        let dominant = majorities
            .get_mut(rule.place)
            .is_some_and(|majority| majority.note(key));
        if !dominant {
            return;
        }
        rule.metrics.dominant_keys.increment(1);
        if rule.dominant_key.is_first() {
            let hint = if rule.key.has_address() {
                "; if the address is a proxy's, name it in client_ip.trusted_proxies"
            } else {
                ""
            };
            tracing::warn!(
                limit = rule.name,
                key = readable(),
                "one key has more than 80 % of the requests that this limit counts{hint}"
            );
        }
    }
}
