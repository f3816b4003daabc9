//! The caller's own quotas: a page that says how each limit stands that counts this caller, and charges none of them.
//!
//! The page meets one limit of its own, by address, so that asking is no way to keep the gateway busy. A caller whose credential does not
//! verify never sees it: guessing meets what it meets elsewhere.

use std::{num::NonZeroU64, time::Duration};

use http::{HeaderValue, Method, Response, StatusCode};

use super::{
    Body, RequestContext, Worker,
    admit::{Concern, Met},
    answer,
    plan::LimitPlan,
    record::{self, Ours},
};
use crate::{
    config,
    identity::KeyPart,
    limit::{Algorithm, Quota, Standing},
    response::{self, OwnQuota, Refusal},
};

/// What the page is called where routes and limits are; not a name that a configuration can give.
pub(super) const NAME: &str = "(status)";

/// How often one address may ask: once a second, and ten times at once.
pub(super) fn limit() -> config::Limit {
    const TEN: NonZeroU64 = NonZeroU64::new(10).expect("ten is not zero");
    let quota = Quota {
        amount: NonZeroU64::MIN,
        period: Duration::from_secs(1),
        burst: TEN,
    };
    config::Limit::new(NAME, vec![KeyPart::Ip], Algorithm::TokenBucket, vec![quota])
}

/// Whether the page takes this method.
pub(super) fn takes(method: &Method) -> Result<(), Refusal> {
    match *method {
        Method::GET | Method::HEAD => Ok(()),
        _ => Err(Refusal::MethodNotAllowed {
            allow: HeaderValue::from_static("GET, HEAD"),
        }),
    }
}

impl Worker {
    /// Answers with every limit that the caller may know of, in the order of the configuration.
    pub(super) fn own_quotas(&self, request: &RequestContext<'_>) -> Response<Body> {
        let plan = &self.shared.plan;
        let mut limits: Vec<&LimitPlan> = plan.met().collect();
        limits.retain(|limit| limit.rule.name != NAME);
        limits.sort_by_key(|limit| limit.rule.place);
        let quotas: Vec<OwnQuota<'_>> = limits
            .into_iter()
            .filter_map(|limit| self.own_quota(request, limit))
            .collect();
        let standings = request.decision.verdict.standings();
        let response = response::own_quotas(
            &quotas,
            &answer::met(request, &standings),
            &answer::asked(request),
            &plan.response,
            &mut self.fields.borrow_mut(),
            self.shared.process.wall_clock(request.decision.decided_at),
        );
        let bytes = response.body().len() as u64;
        record::note(self, request, StatusCode::OK, bytes, Ours::Asked);
        response.map(Body::authored)
    }

    /// How one limit stands to the caller; `None` where it does not count them, acts on nobody, or is not disclosed.
    fn own_quota<'a>(
        &self,
        request: &RequestContext<'_>,
        limit: &'a LimitPlan,
    ) -> Option<OwnQuota<'a>> {
        let (rule, plan) = (&limit.rule, &self.shared.plan);
        if !rule.settings.disclose || rule.mode() != config::Mode::Enforce {
            return None;
        }
        let asked = request.decision.attributes.as_ref()?;
        let (_, concern) = request
            .decision
            .with_subject(&plan.table, asked, |subject| {
                self.concern(rule, &asked.client, subject)
            });
        let (tier, key, blocked) = match concern {
            Concern::Counted { tier, key, blocked } => (tier, key, blocked),
            // what the page is asked for says nothing of what other requests are for
            Concern::NoKey | Concern::Unkeyed if rule.key.depends_on_target() => {
                (rule.tier(&asked.client), None, None)
            }
            Concern::Exempt | Concern::Boosted(_) | Concern::NoKey | Concern::Unkeyed => {
                return None;
            }
        };
        let policy = &rule.policies[tier];
        if rule.key.depends_on_target() {
            let stands = None;
            return Some(OwnQuota { policy, stands });
        }
        if !rule.acts_on(rule.mode(), key) {
            return None;
        }
        let met = Met::new(limit, tier, key, blocked);
        let standing = self.stands(request, &met)?;
        let stands = Some(answer::told(&met, &standing));
        Some(OwnQuota { policy, stands })
    }

    /// As far as this gateway knows, where others keep the limit, too.
    fn stands(&self, request: &RequestContext<'_>, met: &Met<'_>) -> Option<Standing> {
        let shared = &self.shared;
        let now_ns = shared.process.nanoseconds(request.decision.decided_at);
        let verdict = match (&shared.budget, met.claim(1)) {
            (Some(budget), Some(claim)) => budget.peek(now_ns, &[claim]),
            _ => shared.process.store.peek(now_ns, &[met.charge_of(1)]),
        };
        let finding = verdict.findings.first()?;
        let closed = met.blocked.map(|blocked| blocked.finding(finding));
        Some(closed.unwrap_or(*finding).standing())
    }
}
