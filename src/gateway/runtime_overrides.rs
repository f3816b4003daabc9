//! Runtime overrides: operators switch a limit off or to shadow mode for a while, ban a key, or
//! grant it extra units.
//!
//! - **Cost.** A decision reads one byte per limit. It looks up overrides by key only if that byte
//!   says so.
//! - **Bounds.** [`KEYS_MAX`] keys per limit.
//! - **Scope.** Gateways that share limits exchange overrides through Redis within seconds
//!   (the override sync of `budget`). Each counts the rest of a grant on its own.
//! - **Time.** An override expires by itself. The process calls [`RuntimeOverrides::refresh`] every
//!   second, so expiry is up to a second late.
//!
//! Reloads change nothing here. After a restart a gateway with Redis reads the shared overrides
//! back; all others are gone.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU8, AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use arc_swap::ArcSwap;
use serde_json::{Value, json};

use crate::{
    budget::{OverrideEntry, OverrideSnapshot},
    config::Mode,
};

/// Keys per limit that can have overrides.
pub const KEYS_MAX: usize = 1_000;

/// When an override expires; `None` lasts until it is removed.
pub type Expiry = Option<SystemTime>;

/// All runtime overrides of a process, by limit. They survive reloads.
#[derive(Debug, Default)]
pub struct RuntimeOverrides {
    state: Mutex<OverrideState>,
}

#[derive(Debug, Default)]
struct OverrideState {
    /// Applies to every limit, including limits that a reload adds.
    all: Option<ModeOverride>,
    /// The same for this gateway only; not shared.
    all_here: Option<ModeOverride>,
    limits: BTreeMap<String, Arc<LimitOverrides>>,
}

/// A mode that replaces the configured one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModeOverride {
    /// [`Mode::Off`] or [`Mode::Shadow`].
    pub mode: Mode,
    /// Expiry.
    pub until: Expiry,
}

/// An override for one key.
#[derive(Clone, Debug, Default)]
pub struct KeyOverride {
    /// Set if the key is banned: nothing is admitted.
    pub banned: Option<Expiry>,
    /// Extra units.
    pub boost: Option<Arc<QuotaGrant>>,
}

/// Units that a key may spend before its limit counts again.
#[derive(Debug)]
pub struct QuotaGrant {
    /// Identifies the grant among gateways.
    pub id: u64,
    /// Units granted.
    pub amount: u64,
    /// Unspent units expire then.
    pub until: Expiry,
    left: AtomicU64,
}

impl QuotaGrant {
    /// A new grant with all units unspent.
    pub fn new(amount: u64, until: Expiry) -> QuotaGrant {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let id = now.unwrap_or_default().as_micros();
        QuotaGrant::of(u64::try_from(id).unwrap_or(u64::MAX), amount, until)
    }

    fn of(id: u64, amount: u64, until: Expiry) -> QuotaGrant {
        QuotaGrant {
            id,
            amount,
            until,
            left: AtomicU64::new(amount),
        }
    }

    /// Unspent units.
    pub fn left(&self) -> u64 {
        self.left.load(Relaxed)
    }

    /// Spends `units`, all or none.
    pub(super) fn take(&self, units: u64) -> bool {
        let less = |left: u64| left.checked_sub(units);
        self.left.fetch_update(Relaxed, Relaxed, less).is_ok()
    }

    pub(super) fn give_back(&self, units: u64) {
        self.left.fetch_add(units, Relaxed);
    }
}

/// The limit has no room for another key's override.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("this limit already has runtime overrides for {KEYS_MAX} keys")]
pub struct TooManyOverrides;

/// The overrides of one limit, as decisions read them.
#[derive(Debug, Default)]
pub struct LimitOverrides {
    /// One of the mode constants below, plus `ON_KEYS`.
    in_force: AtomicU8,
    acting: Mutex<Option<ModeOverride>>,
    /// The same for this gateway only; not shared.
    acting_here: Mutex<Option<ModeOverride>>,
    keys: ArcSwap<HashMap<String, KeyOverride>>,
}

const OFF: u8 = 1;
const SHADOW: u8 = 2;
const ON_KEYS: u8 = 4;

/// The overrides of a limit in force at one moment.
#[derive(Clone, Copy, Debug)]
pub(super) struct InForce(u8);

impl InForce {
    /// The mode, if overridden.
    #[inline]
    pub(super) fn mode(self) -> Option<Mode> {
        match self.0 & (OFF | SHADOW) {
            0 => None,
            OFF => Some(Mode::Off),
            _ => Some(Mode::Shadow),
        }
    }

    #[inline]
    pub(super) fn on_keys(self) -> bool {
        self.0 & ON_KEYS != 0
    }
}

impl LimitOverrides {
    #[inline]
    pub(super) fn in_force(&self) -> InForce {
        InForce(self.in_force.load(Relaxed))
    }

    /// The override of a key, named as in access lines.
    pub fn on_key(&self, readable: &str) -> Option<KeyOverride> {
        let key_override = self.known(readable)?.now(SystemTime::now());
        key_override.says_something().then_some(key_override)
    }

    /// Like `on_key`, but includes spent grants.
    fn known(&self, readable: &str) -> Option<KeyOverride> {
        let key_override = self.keys.load().get(readable).cloned();
        key_override.filter(|key_override| key_override.is_in_force(SystemTime::now()))
    }

    /// All overrides of keys in force.
    pub fn on_keys(&self) -> Vec<(String, KeyOverride)> {
        let now = SystemTime::now();
        let keys = self.keys.load();
        let in_force = keys
            .iter()
            .filter(|(_, key_override)| key_override.is_in_force(now));
        let mut runtime_overrides: Vec<_> = in_force
            .map(|(key, key_override)| (key.clone(), key_override.now(now)))
            .filter(|(_, key_override)| key_override.says_something())
            .collect();
        runtime_overrides.sort_by(|(one, _), (other, _)| one.cmp(other));
        runtime_overrides
    }

    /// The mode override for all gateways that share limits with this one.
    pub fn shared_mode(&self) -> Option<ModeOverride> {
        *lock(&self.acting)
    }

    /// The mode override for this gateway only.
    pub fn local_mode(&self) -> Option<ModeOverride> {
        *lock(&self.acting_here)
    }

    fn holds(&self) -> bool {
        self.shared_mode().is_some() || self.local_mode().is_some() || !self.keys.load().is_empty()
    }

    fn refresh(&self, all: [Option<ModeOverride>; 2], now: SystemTime) {
        let (mut acting, mut here) = (lock(&self.acting), lock(&self.acting_here));
        for acting in [&mut *acting, &mut *here] {
            if acting.is_some_and(|acting| !lasts(acting.until, now)) {
                *acting = None;
            }
        }
        let keys = self.keys.load();
        if keys
            .values()
            .any(|key_override| !key_override.is_in_force(now))
        {
            let mut left = HashMap::clone(&keys);
            left.retain(|_, key_override| key_override.is_in_force(now));
            self.keys.store(Arc::new(left));
        }
        // `off` for all limits outranks an override of one limit.
        let strongest =
            all.into_iter()
                .chain([*acting, *here])
                .flatten()
                .map(|acting| match acting.mode {
                    Mode::Off => OFF,
                    _ => SHADOW,
                });
        let mode = strongest.min().unwrap_or(0);
        let on_keys = if self.keys.load().is_empty() {
            0
        } else {
            ON_KEYS
        };
        self.in_force.store(mode | on_keys, Relaxed);
    }
}

impl KeyOverride {
    fn is_in_force(&self, now: SystemTime) -> bool {
        // Keep a spent grant, or the copy from another gateway would grant it again.
        let has_boost = self
            .boost
            .as_ref()
            .is_some_and(|boost| lasts(boost.until, now));
        has_boost || self.banned.is_some_and(|until| lasts(until, now))
    }

    fn says_something(&self) -> bool {
        self.banned.is_some() || self.boost.is_some()
    }

    /// The override without its expired parts.
    fn now(&self, now: SystemTime) -> KeyOverride {
        KeyOverride {
            banned: self.banned.filter(|until| lasts(*until, now)),
            boost: self
                .boost
                .clone()
                .filter(|boost| lasts(boost.until, now) && boost.left() > 0),
        }
    }
}

/// The subject of an override, as sent to other gateways.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OverrideSubject<'a> {
    /// Every limit.
    All,
    /// The mode of one limit.
    Limit(&'a str),
    /// One key of a limit.
    Key(&'a str, &'a str),
}

impl OverrideSubject<'_> {
    fn subject(self) -> String {
        match self {
            OverrideSubject::All => "all".to_owned(),
            OverrideSubject::Limit(limit) => format!("limit {limit}"),
            OverrideSubject::Key(limit, key) => format!("key {limit} {key}"),
        }
    }

    /// Limit names contain no spaces; key names may.
    fn of(subject: &str) -> Option<OverrideSubject<'_>> {
        match subject.split_once(' ') {
            None => (subject == "all").then_some(OverrideSubject::All),
            Some(("limit", limit)) => Some(OverrideSubject::Limit(limit)),
            Some(("key", rest)) => {
                let (limit, key) = rest.split_once(' ')?;
                Some(OverrideSubject::Key(limit, key))
            }
            Some(_) => None,
        }
    }
}

/// Exchange with other gateways.
impl RuntimeOverrides {
    /// The override of a subject, for other gateways.
    pub fn notice(&self, about: OverrideSubject<'_>) -> OverrideEntry {
        let value = match about {
            OverrideSubject::All => self.mode_of_all().map(acting_json),
            OverrideSubject::Limit(limit) => self.on(limit).shared_mode().map(acting_json),
            OverrideSubject::Key(limit, key) => self.on(limit).known(key).map(|key| key_json(&key)),
        };
        let ends = value.as_ref().map(|value| {
            let ends = [
                &value["until"],
                &value["banned"]["until"],
                &value["boost"]["until"],
            ];
            let is_endless = |part: &str| value[part].is_object() && value[part]["until"].is_null();
            let endless = value.get("mode").is_some() && value["until"].is_null()
                || is_endless("banned")
                || is_endless("boost");
            let last = ends.into_iter().filter_map(Value::as_u64).max();
            if endless { 0 } else { last.unwrap_or(0) }
        });
        OverrideEntry {
            subject: about.subject(),
            value: value.map(|value| value.to_string()),
            until_ms: ends.unwrap_or(0),
        }
    }

    /// Adopts the shared overrides, and removes those no longer shared. If the shared state is new
    /// (`is_news`), removes none and returns the overrides it lacks.
    pub(super) fn read(&self, posted: &OverrideSnapshot, is_news: bool) -> Vec<OverrideEntry> {
        let mut lacking = Vec::new();
        for notice in self.notices() {
            if !posted.contains_key(&notice.subject) {
                match (is_news, OverrideSubject::of(&notice.subject)) {
                    (true, _) => lacking.push(notice),
                    (false, Some(about)) => self.accept(about, &Value::Null),
                    (false, None) => {}
                }
            }
        }
        for (subject, value) in posted {
            let value = serde_json::from_str(value).unwrap_or_default();
            if let Some(about) = OverrideSubject::of(subject) {
                self.accept(about, &value);
            }
        }
        lacking
    }

    fn notices(&self) -> Vec<OverrideEntry> {
        let limits: Vec<(String, Arc<LimitOverrides>)> = {
            let state = lock(&self.state);
            let limits = state.limits.iter();
            limits
                .map(|(name, runtime_overrides)| (name.clone(), Arc::clone(runtime_overrides)))
                .collect()
        };
        let mut notices = vec![self.notice(OverrideSubject::All)];
        for (limit, runtime_overrides) in &limits {
            notices.push(self.notice(OverrideSubject::Limit(limit)));
            for key in runtime_overrides.keys.load().keys() {
                notices.push(self.notice(OverrideSubject::Key(limit, key)));
            }
        }
        notices.retain(|notice| notice.value.is_some());
        notices
    }

    /// Applies another gateway's override; `null` removes it.
    fn accept(&self, about: OverrideSubject<'_>, value: &Value) {
        let mode = match value["mode"].as_str() {
            None => None,
            Some("off") => Some(Mode::Off),
            Some("shadow") => Some(Mode::Shadow),
            // From a later version.
            Some(_) => {
                tracing::warn!(subject = about.subject(), runtime_override = %value, "ignored a runtime override of another gateway: unknown mode");
                return;
            }
        };
        let acting = mode.map(|mode| ModeOverride {
            mode,
            until: moment(&value["until"]),
        });
        let known = self.notice(about).value;
        let known = known.and_then(|known| serde_json::from_str(&known).ok());
        if known.unwrap_or(Value::Null) == *value {
            return;
        }
        let subject = about.subject();
        tracing::warn!(subject, runtime_override = %value, "applied a runtime override of another gateway");
        match about {
            OverrideSubject::All => self.set_mode_of_all(acting),
            OverrideSubject::Limit(limit) => self.set_mode(limit, acting),
            OverrideSubject::Key(limit, key) => {
                let applied = self.rule_key(limit, key, |key_override| {
                    let banned = &value["banned"];
                    key_override.banned = banned.is_object().then(|| moment(&banned["until"]));
                    let boost = &value["boost"];
                    let amount = boost["amount"].as_u64();
                    let (id, until) = (boost["id"].as_u64().unwrap_or(0), moment(&boost["until"]));
                    let known = key_override.boost.take().filter(|known| known.id == id);
                    key_override.boost = amount.map(|amount| {
                        known.unwrap_or_else(|| Arc::new(QuotaGrant::of(id, amount, until)))
                    });
                });
                if let Err(full) = applied {
                    tracing::warn!(
                        limit,
                        key,
                        "ignored a runtime override of another gateway: {full}"
                    );
                }
            }
        }
    }
}

fn acting_json(acting: ModeOverride) -> Value {
    let mode = if acting.mode == Mode::Off {
        "off"
    } else {
        "shadow"
    };
    json!({ "mode": mode, "until": milliseconds(acting.until) })
}

/// Leaves out the unspent units: each gateway counts its own.
fn key_json(key: &KeyOverride) -> Value {
    let banned = key
        .banned
        .map(|until| json!({ "until": milliseconds(until) }));
    let boost = key.boost.as_ref().map(|boost| {
        json!({ "id": boost.id, "amount": boost.amount, "until": milliseconds(boost.until) })
    });
    json!({ "banned": banned, "boost": boost })
}

fn milliseconds(until: Expiry) -> Option<u64> {
    let since = until?.duration_since(UNIX_EPOCH).unwrap_or_default();
    Some(u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
}

fn moment(milliseconds: &Value) -> Expiry {
    UNIX_EPOCH.checked_add(Duration::from_millis(milliseconds.as_u64()?))
}

impl RuntimeOverrides {
    /// The overrides of the limit of this name.
    pub fn on(&self, limit: &str) -> Arc<LimitOverrides> {
        let mut state = lock(&self.state);
        let all = [state.all, state.all_here];
        let runtime_overrides = state.limits.entry(limit.to_owned()).or_insert_with(|| {
            let fresh = LimitOverrides::default();
            fresh.refresh(all, SystemTime::now());
            Arc::new(fresh)
        });
        Arc::clone(runtime_overrides)
    }

    /// The mode override for all limits.
    pub fn mode_of_all(&self) -> Option<ModeOverride> {
        lock(&self.state).all
    }

    /// The mode override for all limits on this gateway only.
    pub fn local_mode_of_all(&self) -> Option<ModeOverride> {
        lock(&self.state).all_here
    }

    /// Overrides the mode of all limits; `None` restores the configured modes.
    pub fn set_mode_of_all(&self, acting: Option<ModeOverride>) {
        lock(&self.state).all = acting;
        self.refresh();
    }

    /// The same for this gateway only. It is not sent to other gateways, and theirs do not end it.
    pub fn set_local_mode_of_all(&self, acting: Option<ModeOverride>) {
        lock(&self.state).all_here = acting;
        self.refresh();
    }

    /// Overrides the mode of one limit; `None` restores the configured mode.
    pub fn set_mode(&self, limit: &str, acting: Option<ModeOverride>) {
        *lock(&self.on(limit).acting) = acting;
        self.refresh();
    }

    /// The same for this gateway only.
    pub fn set_local_mode(&self, limit: &str, acting: Option<ModeOverride>) {
        *lock(&self.on(limit).acting_here) = acting;
        self.refresh();
    }

    /// Changes the override of one key.
    pub fn rule_key(
        &self,
        limit: &str,
        key: &str,
        change: impl FnOnce(&mut KeyOverride),
    ) -> Result<(), TooManyOverrides> {
        let runtime_overrides = self.on(limit);
        // One writer at a time.
        let state = lock(&self.state);
        let mut keys = HashMap::clone(&runtime_overrides.keys.load());
        let mut key_override = keys.remove(key).unwrap_or_default();
        change(&mut key_override);
        if key_override.is_in_force(SystemTime::now()) {
            if keys.len() >= KEYS_MAX {
                return Err(TooManyOverrides);
            }
            keys.insert(key.to_owned(), key_override);
        }
        runtime_overrides.keys.store(Arc::new(keys));
        drop(state);
        self.refresh();
        Ok(())
    }

    /// Drops expired overrides. Call it every second.
    pub fn refresh(&self) {
        let now = SystemTime::now();
        let mut state = lock(&self.state);
        let OverrideState { all, all_here, .. } = &mut *state;
        for all in [all, all_here] {
            if all.is_some_and(|all| !lasts(all.until, now)) {
                *all = None;
            }
        }
        let all = [state.all, state.all_here];
        state.limits.retain(|_, runtime_overrides| {
            runtime_overrides.refresh(all, now);
            // Drop a limit removed by a reload once it has no override in force.
            Arc::strong_count(runtime_overrides) > 1 || runtime_overrides.holds()
        });
    }
}

fn lasts(until: Expiry, now: SystemTime) -> bool {
    until.is_none_or(|until| now < until)
}

/// Ignores poisoning: the guarded data is consistent between any two statements.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn from_now(seconds: i64) -> Expiry {
        let span = Duration::from_secs(seconds.unsigned_abs());
        let now = SystemTime::now();
        Some(if seconds < 0 { now - span } else { now + span })
    }

    fn acting(mode: Mode, until: Expiry) -> Option<ModeOverride> {
        Some(ModeOverride { mode, until })
    }

    #[test]
    fn a_limit_is_as_configured_until_it_is_ruled_on_and_after() {
        let runtime_overrides = RuntimeOverrides::default();
        let limit = runtime_overrides.on("a");
        assert_eq!(limit.in_force().mode(), None);
        runtime_overrides.set_mode("a", acting(Mode::Shadow, from_now(60)));
        assert_eq!(limit.in_force().mode(), Some(Mode::Shadow));
        assert_eq!(runtime_overrides.on("b").in_force().mode(), None);
        runtime_overrides.set_mode_of_all(acting(Mode::Off, None));
        assert_eq!(limit.in_force().mode(), Some(Mode::Off), "the stronger");
        assert_eq!(
            runtime_overrides.on("new").in_force().mode(),
            Some(Mode::Off)
        );
        runtime_overrides.set_mode_of_all(None);
        assert_eq!(limit.in_force().mode(), Some(Mode::Shadow));
        runtime_overrides.set_mode("a", acting(Mode::Off, from_now(-1)));
        assert_eq!(limit.in_force().mode(), None, "its time is over");
    }

    #[test]
    fn what_is_ruled_for_one_gateway_is_not_told_to_others_nor_ended_by_them() {
        let runtime_overrides = RuntimeOverrides::default();
        let mode = || runtime_overrides.on("a").in_force().mode();
        runtime_overrides.set_local_mode("a", acting(Mode::Shadow, from_now(60)));
        runtime_overrides.set_local_mode_of_all(acting(Mode::Off, from_now(60)));
        assert_eq!(
            (mode(), runtime_overrides.notices().len()),
            (Some(Mode::Off), 0)
        );
        runtime_overrides.read(&OverrideSnapshot::new(), false);
        assert_eq!(mode(), Some(Mode::Off));
        runtime_overrides.set_local_mode_of_all(None);
        assert_eq!(mode(), Some(Mode::Shadow));
        runtime_overrides.set_local_mode("a", acting(Mode::Off, from_now(-1)));
        assert_eq!(mode(), None, "its time is over");
    }

    #[test]
    fn a_boost_is_spent_or_expires_and_a_ban_goes_on() {
        let runtime_overrides = RuntimeOverrides::default();
        let limit = runtime_overrides.on("a");
        let boost = |amount, until| {
            let boost = Arc::new(QuotaGrant::new(amount, until));
            runtime_overrides.rule_key("a", "ip=1", |key| key.boost = Some(boost))
        };
        boost(3, from_now(60)).expect("there is room");
        assert!(limit.in_force().on_keys());
        let held = limit
            .on_key("ip=1")
            .and_then(|key| key.boost)
            .expect("it is granted");
        assert!(held.take(2) && !held.take(2) && held.take(1));
        assert!(limit.on_key("ip=1").is_none(), "all of it is spent");
        held.give_back(1);
        assert!(limit.on_key("ip=1").is_some());
        boost(3, from_now(-1)).expect("there is room");
        assert!(!limit.in_force().on_keys());
        runtime_overrides
            .rule_key("a", "ip=1", |key| key.banned = Some(None))
            .expect("there is room");
        runtime_overrides.refresh();
        assert_eq!(limit.on_keys().len(), 1);
    }

    #[test]
    fn a_ruling_of_another_gateway_is_taken_over_and_one_that_is_not_understood_changes_nothing() {
        let runtime_overrides = RuntimeOverrides::default();
        let posted = |mode: &str| {
            OverrideSnapshot::from([("limit a".to_owned(), format!("{{\"mode\":\"{mode}\"}}"))])
        };
        let mode = || runtime_overrides.on("a").in_force().mode();
        runtime_overrides.read(&posted("off"), false);
        assert_eq!(mode(), Some(Mode::Off));
        runtime_overrides.read(&posted("gentle"), false);
        assert_eq!(mode(), Some(Mode::Off));
        runtime_overrides.read(&posted("shadow"), false);
        assert_eq!(mode(), Some(Mode::Shadow));
        runtime_overrides.read(&OverrideSnapshot::new(), false);
        assert_eq!(mode(), None);
    }

    #[test]
    fn rulings_on_keys_are_bounded_and_what_is_over_makes_room() {
        let runtime_overrides = RuntimeOverrides::default();
        let ban = |key: usize, until| {
            runtime_overrides.rule_key("a", &key.to_string(), |key_override| {
                key_override.banned = Some(until)
            })
        };
        for key in 0..KEYS_MAX {
            ban(key, from_now(60)).expect("there is room");
        }
        assert_eq!(ban(KEYS_MAX, None), Err(TooManyOverrides));
        assert_eq!(ban(7, None), Ok(()), "that one is there");
        ban(7, from_now(-1)).expect("it is lifted");
        assert_eq!(ban(KEYS_MAX, None), Ok(()));
        assert_eq!(runtime_overrides.on("a").on_keys().len(), KEYS_MAX);
    }
}
