//! What operators see of a gateway that runs, and what they change: limits, one key, rulings, decisions.

use std::{sync::Arc, time::Duration};

use tokio::time::Instant;

use super::{
    Shared,
    notebook::{Notebooks, TopKey},
    plan::LimitRule,
    rulings::{About, LimitRulings, Rulings, TooManyRulings},
};
use crate::{
    budget::Claim,
    config::{self, Mode},
    limit::{Charge, Key},
};

/// One limit, as it is.
#[derive(Debug)]
pub struct LimitView {
    /// As configured.
    pub settings: config::Limit,
    /// Its algorithm, as configured.
    pub algorithm: &'static str,
    /// How it acts at the moment.
    pub mode: Mode,
    /// Buckets in memory, and what became of others.
    pub keys: u64,
    /// Buckets forgotten to make room for others.
    pub evictions: u64,
    /// Decisions made in a shared bucket.
    pub overflowed: u64,
    /// Who is rejected most.
    pub top: Vec<TopKey>,
    /// What operators have decided about it.
    pub rulings: Arc<LimitRulings>,
}

/// One bucket, as it is.
#[derive(Clone, Debug, PartialEq)]
pub struct KeyView {
    /// Its name, in full.
    pub name: String,
    /// The most that it holds, in units.
    pub capacity: u64,
    /// Units left.
    pub remaining: u64,
    /// Until all of it is there again.
    pub reset: Duration,
    /// Until a request for one unit passes; `None` where it passes now, or nobody knows.
    pub retry_after: Option<Duration>,
    /// Where it is kept: `local`, or `lease` for what this gateway has borrowed of a shared one.
    pub source: &'static str,
}

/// Whom a ruling reaches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// This gateway.
    ThisOne,
    /// Every gateway that shares limits through the same Redis, soon.
    All,
}

/// Why a key cannot be shown or ruled on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoKey {
    /// There is no such limit.
    #[error("there is no limit `{0}`")]
    Limit(String),
    /// The name is not that of a key.
    #[error("`{0}` is not the key of a bucket: write it as access lines show it, such as `{1}`")]
    Name(String, String),
}

impl Shared {
    /// What operators have decided beside the configuration.
    pub fn rulings(&self) -> &Rulings {
        &self.rulings
    }

    /// What workers remember.
    pub fn notebooks(&self) -> &Notebooks {
        &self.notebooks
    }

    /// Every limit, in the order of the configuration.
    pub fn limits(&self) -> Vec<LimitView> {
        let now = Instant::now();
        let limits = self.plan.limits.iter().take(self.snapshot().limits.len());
        limits.map(|rule| self.view(rule, now)).collect()
    }

    fn view(&self, rule: &LimitRule, now: Instant) -> LimitView {
        LimitView {
            settings: rule.settings.clone(),
            algorithm: rule.algorithm,
            mode: rule.mode(),
            keys: rule.buckets.keys(),
            evictions: rule.buckets.evictions(),
            overflowed: rule.buckets.overflowed(),
            top: self.notebooks.top(&rule.name, now),
            rulings: Arc::clone(&rule.rulings),
        }
    }

    /// How the bucket of a key stands for a tier (the default one where the limit knows no such tier).
    pub fn key(&self, limit: &str, name: &str, tier: Option<&str>) -> Result<KeyView, NoKey> {
        let rule = self.rule(limit)?;
        let (name, key) = self.named(rule, name)?;
        let tiers = &rule.settings.tiers;
        let tier = tiers.iter().find(|(known, _)| Some(&**known) == tier);
        let tier = tier.map_or(0, |(_, tier)| *tier);
        let now_ns = self.nanoseconds(Instant::now());
        let together = rule.shared.as_ref().zip(self.budget.as_ref());
        let verdict = match together {
            Some((limit, budget)) => {
                let claim = Claim {
                    limit,
                    tier,
                    key,
                    cost: 1,
                };
                budget.peek(now_ns, &[claim])
            }
            None => {
                let charge = Charge {
                    limit: &rule.buckets,
                    tier,
                    key,
                    cost: 1,
                    max_delay_ns: 0,
                };
                self.store.peek(now_ns, &[charge])
            }
        };
        let standings = verdict.standings();
        let standing = standings.first().ok_or_else(|| not_named(rule, &name))?;
        Ok(KeyView {
            name,
            capacity: standing.capacity,
            remaining: standing.remaining,
            reset: Duration::from_nanos(standing.reset_ns),
            retry_after: standing.retry_after_ns.map(Duration::from_nanos),
            source: if together.is_some() { "lease" } else { "local" },
        })
    }

    /// The name of a key in full, if it is the name of one.
    pub fn key_name(&self, limit: &str, name: &str) -> Result<String, NoKey> {
        Ok(self.named(self.rule(limit)?, name)?.0)
    }

    /// Rules about something, and lets the gateways that share limits with this one know. They hear of it within some seconds.
    pub fn rule_and_tell(
        &self,
        about: About<'_>,
        rule: impl FnOnce(&Rulings) -> Result<(), TooManyRulings>,
    ) -> Result<Reach, TooManyRulings> {
        let ruled = || {
            rule(&self.rulings)?;
            Ok(self.rulings.notice(about))
        };
        let is_posted = match &self.budget {
            Some(budget) => budget.board().post(ruled)?,
            None => {
                ruled()?;
                false
            }
        };
        match is_posted {
            true => Ok(Reach::All),
            false => Ok(Reach::ThisOne),
        }
    }

    /// Whether a limit is kept together with other gateways.
    pub fn is_shared(&self, limit: &str) -> bool {
        self.rule(limit).is_ok_and(|rule| rule.shared.is_some())
    }

    /// Forgets what a key has spent in this gateway.
    pub fn reset(&self, limit: &str, name: &str) -> Result<(), NoKey> {
        let rule = self.rule(limit)?;
        let (_, key) = self.named(rule, name)?;
        self.store.forget(&rule.buckets, key);
        Ok(())
    }

    fn rule(&self, limit: &str) -> Result<&Arc<LimitRule>, NoKey> {
        let found = self.plan.limit(limit);
        found.ok_or_else(|| NoKey::Limit(limit.to_owned()))
    }

    /// A key by its name; of one that shows a hash only, where it is among those that are rejected most.
    fn named(&self, rule: &LimitRule, name: &str) -> Result<(String, Option<Key>), NoKey> {
        let known = || {
            let top = self.notebooks.top(&rule.name, Instant::now());
            let one = top.into_iter().find(|top| top.name == name)?;
            Some((one.name, one.key))
        };
        rule.key
            .named(&self.hasher, self.plan.prefixes, name)
            .or_else(known)
            .ok_or_else(|| not_named(rule, name))
    }
}

fn not_named(rule: &LimitRule, name: &str) -> NoKey {
    let part = |part: &crate::identity::KeyPart| match part.to_string().as_str() {
        "ip" => "ip=203.0.113.9/32".to_owned(),
        "user_or_ip" => "user=alice".to_owned(),
        other => format!("{other}=…"),
    };
    let parts: Vec<String> = rule.settings.key.iter().map(part).collect();
    let example = match parts.is_empty() {
        true => "all".to_owned(),
        false => parts.join(", "),
    };
    NoKey::Name(name.to_owned(), example)
}
