//! The operators' view of a running gateway: limits, single keys, runtime overrides, decisions.

use std::{
    sync::Arc,
    time::{Duration, SystemTime},
};

use ipnet::IpNet;

use tokio::time::Instant;

use super::{
    active_config::ActiveConfig,
    decision_log::TopKey,
    plan::LimitRule,
    runtime_overrides::{LimitOverrides, OverrideSubject, RuntimeOverrides, TooManyOverrides},
};
use crate::{
    budget::SharedClaim,
    config::{self, ConfigOverride, Effect, Mode, OverrideTarget},
    limit::{Charge, Key, Standing},
};

/// The present state of one limit.
#[derive(Debug)]
pub struct LimitView {
    /// As configured.
    pub settings: config::LimitSettings,
    /// The algorithm's configuration name.
    pub algorithm: &'static str,
    /// The current mode.
    pub mode: Mode,
    /// Buckets in memory.
    pub keys: u64,
    /// Buckets evicted to make room.
    pub evictions: u64,
    /// Decisions made in a shared overflow bucket.
    pub overflowed: u64,
    /// Buckets reserved for this limit, whatever others use; `None` if there is no other limit.
    pub guaranteed: Option<u64>,
    /// The most rejected keys.
    pub top: Vec<TopKey>,
    /// Its runtime overrides.
    pub runtime_overrides: Arc<LimitOverrides>,
}

/// The present state of one bucket.
#[derive(Clone, Debug, PartialEq)]
pub struct KeyView {
    /// The full name of the key.
    pub name: String,
    /// The standing under the quota that applies, as far as known.
    pub stands: KeyStanding,
    /// Why that quota applies.
    pub applies: QuotaChoice,
    /// The standing in each tier, the default tier first. Empty if there is only one quota.
    pub tiers: Vec<(Option<String>, KeyStanding)>,
    /// `local`, or `lease` for this gateway's leased part of a shared limit.
    pub source: &'static str,
}

/// Which quota applies to a key, and why.
#[derive(Clone, Debug, PartialEq)]
pub enum QuotaChoice {
    /// A configured override names the key.
    Override(ConfigOverride),
    /// The limit exempts it.
    Exempt,
    /// The tier given in the request.
    Asked(String),
    /// The tier in the latest logged decision about the key; `None` is the default tier.
    LastSeen(Option<String>),
    /// The limit has one quota.
    Only,
    /// The limit has tiers, and no decision about the key is logged.
    Unknown,
}

/// The standing of one bucket under one quota.
#[derive(Clone, Debug, PartialEq)]
pub struct KeyStanding {
    /// `100/s`.
    pub rate: String,
    /// Capacity in units.
    pub capacity: u64,
    /// Units left.
    pub remaining: u64,
    /// Time until the bucket is full.
    pub reset: Duration,
    /// Time until a request for one unit passes; `None` if it passes now or the time is unknown.
    pub retry_after: Option<Duration>,
}

/// The scope of a runtime override.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OverrideScope {
    /// This gateway only.
    ThisOne,
    /// All gateways that share limits through this Redis, within seconds.
    All,
}

/// Why a key cannot be shown or overridden.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoKey {
    /// No limit has this name.
    #[error("there is no limit `{0}`")]
    Limit(String),
    /// The name is not a key's.
    #[error("`{0}` is not a key of this limit: write it as in access lines, such as `{1}`")]
    Name(String, String),
}

impl ActiveConfig {
    /// All limits in configuration order.
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
            guaranteed: self.process.store.guaranteed_keys(&rule.buckets),
            top: self.process.decision_logs.top(&rule.name, now),
            runtime_overrides: Arc::clone(&rule.runtime_overrides),
        }
    }

    /// The standing of a key's bucket: under its override or tier, and in each tier of the limit.
    /// `tier` selects another tier.
    pub fn key(&self, limit: &str, name: &str, tier: Option<&str>) -> Result<KeyView, NoKey> {
        let rule = self.rule(limit)?;
        let (name, key) = self.named(rule, name)?;
        let settings = &rule.settings;
        let applies = self.applies(rule, &name, tier);
        let quota_of = |tier: &Option<String>| {
            let named = |(known, _): &&(String, usize)| Some(known) == tier.as_ref();
            settings.tiers.iter().find(named).map_or(0, |(_, at)| *at)
        };
        let quota = match &applies {
            QuotaChoice::Override(exception) => match exception.effect {
                Effect::Quota(quota) => quota,
                Effect::Exempt | Effect::Block => 0,
            },
            QuotaChoice::Asked(tier) => quota_of(&Some(tier.clone())),
            QuotaChoice::LastSeen(tier) => quota_of(tier),
            QuotaChoice::Exempt | QuotaChoice::Only | QuotaChoice::Unknown => 0,
        };
        let stands = |quota| {
            let stands = self.key_standing(rule, key, quota);
            stands.ok_or_else(|| not_named(rule, &name))
        };
        let mut tiers = Vec::new();
        if !settings.tiers.is_empty() {
            tiers.push((None, stands(0)?));
            for (tier, quota) in &settings.tiers {
                tiers.push((Some(tier.clone()), stands(*quota)?));
            }
        }
        let is_shared = rule.shared.is_some() && self.budget.is_some();
        Ok(KeyView {
            stands: stands(quota)?,
            applies,
            tiers,
            source: if is_shared { "lease" } else { "local" },
            name,
        })
    }

    /// Finds the quota of a key from its name and the logged decisions.
    fn applies(&self, rule: &LimitRule, name: &str, asked: Option<&str>) -> QuotaChoice {
        let settings = &rule.settings;
        let now = SystemTime::now();
        let holds = |one: &&ConfigOverride| one.until.is_none_or(|until| now < until);
        let fits = |one: &&ConfigOverride| is_for(settings, &one.target, name);
        let known = |tier: &str| settings.tiers.iter().any(|(known, _)| known == tier);
        if is_exempt(settings, name) {
            return QuotaChoice::Exempt;
        }
        if let Some(exception) = settings.overrides.iter().filter(holds).find(fits) {
            return QuotaChoice::Override(exception.clone());
        }
        if let Some(tier) = asked.filter(|tier| known(tier)) {
            return QuotaChoice::Asked(tier.to_owned());
        }
        if settings.tiers.is_empty() && settings.exempt.tiers.is_empty() {
            return QuotaChoice::Only;
        }
        let is_about =
            |limit: &super::explain::LimitShown| limit.name == rule.name && limit.key == name;
        let latest = self
            .process
            .decision_logs
            .decisions(|one| one.explanation.limits.iter().any(is_about));
        match latest.first().map(|one| &one.explanation.who.tier) {
            Some(Some(tier)) if settings.exempt.tiers.contains(tier) => QuotaChoice::Exempt,
            Some(tier) => QuotaChoice::LastSeen(tier.clone().filter(|tier| known(tier))),
            None => QuotaChoice::Unknown,
        }
    }

    fn key_standing(&self, rule: &LimitRule, key: Option<Key>, tier: usize) -> Option<KeyStanding> {
        let now_ns = self.process.nanoseconds(Instant::now());
        let verdict = match rule.shared.as_ref().zip(self.budget.as_ref()) {
            Some((limit, budget)) => {
                let claim = SharedClaim {
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
                self.process.store.peek(now_ns, &[charge])
            }
        };
        let standing: Standing = *verdict.standings().first()?;
        let quota = rule.settings.quotas.get(tier);
        Some(KeyStanding {
            rate: quota.map_or_else(String::new, ToString::to_string),
            capacity: standing.capacity,
            remaining: standing.remaining,
            reset: Duration::from_nanos(standing.reset_ns),
            retry_after: standing.retry_after_ns.map(Duration::from_nanos),
        })
    }

    /// The full name of a key; an error if the name is not a key's.
    pub fn key_name(&self, limit: &str, name: &str) -> Result<String, NoKey> {
        Ok(self.named(self.rule(limit)?, name)?.0)
    }

    /// Sets a runtime override, and sends it to the gateways that share limits with this one. They
    /// apply it within seconds.
    pub fn set_and_publish(
        &self,
        about: OverrideSubject<'_>,
        rule: impl FnOnce(&RuntimeOverrides) -> Result<(), TooManyOverrides>,
    ) -> Result<OverrideScope, TooManyOverrides> {
        let apply = || {
            rule(&self.process.runtime_overrides)?;
            Ok(self.process.runtime_overrides.notice(about))
        };
        let is_posted = match &self.budget {
            Some(budget) => budget.override_sync().post(apply)?,
            None => {
                apply()?;
                false
            }
        };
        match is_posted {
            true => Ok(OverrideScope::All),
            false => Ok(OverrideScope::ThisOne),
        }
    }

    /// Whether a limit is shared with other gateways.
    pub fn is_shared(&self, limit: &str) -> bool {
        self.rule(limit).is_ok_and(|rule| rule.shared.is_some())
    }

    /// Resets a key's usage in this gateway.
    pub fn reset(&self, limit: &str, name: &str) -> Result<(), NoKey> {
        let rule = self.rule(limit)?;
        let (_, key) = self.named(rule, name)?;
        self.process.store.forget(&rule.buckets, key);
        Ok(())
    }

    fn rule(&self, limit: &str) -> Result<&Arc<LimitRule>, NoKey> {
        let found = self.plan.limit(limit);
        found.ok_or_else(|| NoKey::Limit(limit.to_owned()))
    }

    /// Finds a key by name. A hashed name is found only among the most rejected keys.
    fn named(&self, rule: &LimitRule, name: &str) -> Result<(String, Option<Key>), NoKey> {
        let known = || {
            let top = self.process.decision_logs.top(&rule.name, Instant::now());
            let one = top.into_iter().find(|top| top.name == name)?;
            Some((one.name, one.key))
        };
        rule.key
            .named(&self.process.hasher, self.plan.prefixes, name)
            .or_else(known)
            .ok_or_else(|| not_named(rule, name))
    }
}

/// Splits a key's name into its parts. A user name that contains the separator matches nothing.
fn parts<'n>(settings: &config::LimitSettings, name: &'n str) -> Vec<(&'n str, &'n str)> {
    let one = [name];
    let several: Vec<&str> = name.split(", ").collect();
    let parts = match settings.key.len() {
        0 | 1 => &one[..],
        _ => &several,
    };
    parts
        .iter()
        .filter_map(|part| part.split_once('='))
        .collect()
}

/// Whether a configured override names this key.
fn is_for(settings: &config::LimitSettings, target: &OverrideTarget, name: &str) -> bool {
    let has = |part: &str, value: &str| parts(settings, name).contains(&(part, value));
    match target {
        OverrideTarget::User(user) => has("user", user),
        OverrideTarget::Tenant(tenant) => has("tenant", tenant),
        OverrideTarget::Ip(network) => is_within(settings, name, network),
        OverrideTarget::Key(key) => key == name,
    }
}

fn is_within(settings: &config::LimitSettings, name: &str, network: &IpNet) -> bool {
    let mut parts = parts(settings, name).into_iter();
    let address = parts.find_map(|(part, value)| (part == "ip").then_some(value));
    address
        .and_then(|address| address.parse::<IpNet>().ok())
        .is_some_and(|address| network.contains(&address))
}

fn is_exempt(settings: &config::LimitSettings, name: &str) -> bool {
    let exempt = &settings.exempt;
    let is_named = |user: &String| parts(settings, name).contains(&("user", user.as_str()));
    exempt.users.iter().any(is_named)
        || exempt
            .ips
            .iter()
            .any(|network| is_within(settings, name, network))
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
