//! Finds the limits of a route that apply to a request, and their buckets.

use std::sync::Arc;

use super::{
    applied_limit::{Applicability, AppliedLimit, Block},
    cost_rule::KnownCost,
    decision_context::{DecisionContext, RequestAttributes},
    decision_effect::DecisionEffect,
    observer::DecisionObserver,
    plan::{LimitPlan, LimitRule},
    refusals::LACKS_KEY,
    runtime_overrides::{KeyOverride, QuotaGrant},
    worker::Worker,
};
use crate::{
    config::{Effect, Mode},
    identity::{KeySubject, Keyed},
    response::Refusal,
};

/// Granted units that this request has taken, by grant.
pub(super) type GrantedUnits = Vec<(Arc<QuotaGrant>, u64)>;

impl LimitRule {
    /// The units to claim of a request.
    #[inline]
    fn claim(
        &self,
        attributes: &RequestAttributes<'_>,
        subject: &KeySubject<'_>,
        known: &KnownCost<'_>,
        tier: usize,
    ) -> u64 {
        let Some(cost) = &self.cost else {
            return known.route;
        };
        let is_trusted = attributes.client.peer_trusted;
        let units = cost.claim(known, is_trusted, attributes.headers, subject);
        match cost.reserves() {
            true => units.min(self.buckets.largest_claim(tier)),
            false => units,
        }
    }
}

impl Worker {
    /// Finds the applying limits of the route, and takes granted units of their keys.
    pub(super) fn apply_limits<'a>(
        &self,
        decision: &mut DecisionContext<'a>,
        guesses: bool,
        effect: DecisionEffect,
        observer: &mut impl DecisionObserver<'a>,
    ) -> Result<GrantedUnits, Refusal> {
        let route = decision.route;
        let mut granted = GrantedUnits::new();
        let Some(attributes) = &decision.attributes else {
            return Ok(granted);
        };
        let samples_keys = self.samples_keys();
        let mut limits = std::mem::take(&mut decision.limits);
        let known = decision.known_cost();
        let applied = decision.with_subject(&self.active.plan.table, attributes, |subject| {
            for limit in &route.limits {
                let applicability = self.applicability(attributes, limit, guesses, subject, &known);
                observer.limit(limit, &applicability);
                match applicability {
                    Applicability::Exempt(_) => limit.decisions.exempt.increment(1),
                    Applicability::MissingKey => return Err(LACKS_KEY),
                    Applicability::Granted(boost) => {
                        limit.decisions.exempt.increment(1);
                        let cost = limit.rule.claim(attributes, subject, &known, 0);
                        if effect.charges() && boost.take(cost) {
                            granted.push((boost, cost));
                        }
                    }
                    Applicability::Applies(applied) => {
                        if let Some(key) = applied.key().filter(|_| samples_keys) {
                            let readable = || self.readable(&limit.rule, subject);
                            self.sample_key(&limit.rule, key, readable);
                        }
                        limits.push(applied);
                    }
                    Applicability::Off
                    | Applicability::SwitchedOff
                    | Applicability::NotForGuesses
                    | Applicability::NoKey
                    | Applicability::NotRead => {}
                }
            }
            Ok(())
        });
        decision.limits = limits;
        applied.map(|()| granted)
    }

    /// Whether a limit of the route applies to a request. Changes nothing.
    #[inline]
    pub(super) fn applicability<'a>(
        &self,
        attributes: &RequestAttributes<'_>,
        limit: &'a LimitPlan,
        guesses: bool,
        subject: &KeySubject<'_>,
        known: &KnownCost<'_>,
    ) -> Applicability<'a> {
        let rule = &*limit.rule;
        match rule.mode() {
            Mode::Off if rule.settings.mode == Mode::Off => Applicability::Off,
            Mode::Off => Applicability::SwitchedOff,
            _ if guesses && !limit.everywhere && !rule.key.has_address() => {
                Applicability::NotForGuesses
            }
            mode => match self.bucket(attributes, limit, subject, known) {
                Applicability::Applies(mut applied) => {
                    applied.is_enforced = rule.enforces(mode, applied.key());
                    Applicability::Applies(applied)
                }
                other => other,
            },
        }
    }

    /// Finds the bucket in which a limit counts a request, whatever the limit's mode.
    #[inline]
    pub(super) fn bucket<'a>(
        &self,
        attributes: &RequestAttributes<'_>,
        limit: &'a LimitPlan,
        subject: &KeySubject<'_>,
        known: &KnownCost<'_>,
    ) -> Applicability<'a> {
        let rule = &*limit.rule;
        let client = &attributes.client;
        let (hasher, prefixes) = (&self.active.process.hasher, self.active.plan.prefixes);
        let mut tier = rule.tier(client);
        let mut block = None;
        let readable = || self.readable(rule, subject);
        let exception = rule.exceptions.find(client, readable);
        let by_override = exception.and_then(|exception| exception.place);
        match exception.map(|exception| (exception.effect, exception.until)) {
            Some((Effect::Quota(quota), _)) => tier = quota,
            Some((Effect::Block, until)) => block = Some(Block { until }),
            Some((Effect::Exempt, _)) => return Applicability::Exempt(by_override),
            None => {}
        }
        let key = match rule.key.is_empty() {
            // One bucket for all.
            true => None,
            false => match rule
                .key
                .key(rule.settings.missing, hasher, prefixes, subject)
            {
                Keyed::Bucket(key) => Some(key),
                Keyed::Skip => return Applicability::NoKey,
                Keyed::Missing(_) => return Applicability::MissingKey,
            },
        };
        match self.key_override(rule, subject) {
            Some(KeyOverride {
                banned: Some(until),
                ..
            }) => block = Some(Block { until }),
            Some(KeyOverride {
                boost: Some(boost), ..
            }) => return Applicability::Granted(boost),
            _ => {}
        }
        let cost = rule.claim(attributes, subject, known, tier);
        let bucket = (tier, key);
        Applicability::Applies(AppliedLimit::new(limit, bucket, cost, by_override, block))
    }

    /// The runtime override of a request's key.
    #[inline]
    fn key_override(&self, rule: &LimitRule, subject: &KeySubject<'_>) -> Option<KeyOverride> {
        let on_keys = rule.runtime_overrides.in_force().on_keys();
        on_keys.then(|| rule.runtime_overrides.on_key(&self.readable(rule, subject)))?
    }

    fn readable(&self, rule: &LimitRule, subject: &KeySubject<'_>) -> String {
        rule.key.readable(
            &self.active.process.hasher,
            self.active.plan.prefixes,
            subject,
        )
    }
}
