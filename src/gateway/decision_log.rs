//! Decision log: each worker keeps its latest explained decisions and the most rejected keys per
//! limit.
//!
//! **Bounds.** All workers together keep the last [`DECISIONS`] decisions, each clipped to
//! [`Explanation::CLIPPED_TEXTS`] texts and bytes. Each worker keeps the [`TOP_KEYS`] most rejected
//! keys per limit. It explains at most `EXPLAINED_PER_SECOND` decisions a second,
//! `EXPLAINED_PER_KEY` of one key, and one admission per `ADMISSION_PAUSE`. A flood then costs
//! little and does not evict decisions about other keys. Decisions beyond these bounds appear only
//! in metrics and access lines.
//!
//! **Cost.** An admission without explanation costs one comparison. A rejection costs an
//! uncontended `try_lock`, skipped while somebody reads, and a scan of [`TOP_KEYS`] words.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, SystemTime},
};

use tokio::time::Instant;

use super::explain::report::Explanation;
use crate::limit::Key;

/// Decisions kept by all workers together.
pub const DECISIONS: usize = 1_024;
/// Decisions kept by each worker, at least.
const DECISIONS_LEAST: usize = 32;
/// Decisions that a worker explains per second.
const EXPLAINED_PER_SECOND: u32 = 200;
/// Decisions that a worker explains per second about one key. Approximate: keys share counters.
const EXPLAINED_PER_KEY: u8 = 8;
/// Minimum interval between explained admissions.
const ADMISSION_PAUSE: Duration = Duration::from_millis(250);
/// Most rejected keys that each worker tracks per limit.
pub const TOP_KEYS: usize = 32;
/// The window over which rejections are counted.
const WINDOW: Duration = Duration::from_secs(60);
/// Counters of explanations per key; keys map to them by hash.
const KEYS_SEEN: usize = 256;

/// A recorded decision.
#[derive(Clone, Debug)]
pub struct RememberedDecision {
    /// The time of the decision.
    pub at: SystemTime,
    /// The request id that the client received.
    pub request_id: String,
    /// Whether all limits admitted the request.
    pub admitted: bool,
    /// The request, the outcome and the reasons.
    pub explanation: Arc<Explanation>,
}

/// A key with its rejections in about the last minute.
#[derive(Clone, Debug, PartialEq)]
pub struct TopKey {
    /// The key as access lines show it.
    pub name: String,
    /// The key of its bucket.
    pub key: Option<Key>,
    /// Estimated rejections. The error is at most the count of a key outside the top.
    pub rejected: f64,
}

/// The decision logs of all workers. They survive reloads.
#[derive(Debug)]
pub struct DecisionLogs {
    capacity: usize,
    books: Mutex<Vec<Arc<DecisionLog>>>,
}

impl DecisionLogs {
    pub(super) fn new(workers: usize) -> DecisionLogs {
        DecisionLogs {
            capacity: (DECISIONS / workers.max(1)).max(DECISIONS_LEAST),
            books: Mutex::default(),
        }
    }

    /// Adds the log of one worker.
    pub(super) fn open(&self) -> Arc<DecisionLog> {
        let book = Arc::new(DecisionLog::new(self.capacity));
        lock(&self.books).push(Arc::clone(&book));
        book
    }

    /// The matching decisions of all workers, newest first.
    pub fn decisions(
        &self,
        wanted: impl Fn(&RememberedDecision) -> bool,
    ) -> Vec<RememberedDecision> {
        let mut found = Vec::new();
        for book in &*lock(&self.books) {
            let pages = lock(&book.pages);
            found.extend(pages.decisions.iter().filter(|page| wanted(page)).cloned());
        }
        found.sort_by_key(|page| std::cmp::Reverse(page.at));
        found
    }

    /// The most rejected keys of a limit.
    pub fn top(&self, limit: &str, now: Instant) -> Vec<TopKey> {
        let mut found: Vec<TopKey> = Vec::new();
        for book in &*lock(&self.books) {
            let pages = lock(&book.pages);
            let Some((_, top)) = pages.tops.iter().find(|(name, _)| name == limit) else {
                continue;
            };
            for one in top.keys(now) {
                match found.iter_mut().find(|other| other.key == one.key) {
                    Some(same) => same.rejected += one.rejected,
                    None => found.push(one),
                }
            }
        }
        found.sort_by(|one, other| other.rejected.total_cmp(&one.rejected));
        found.truncate(TOP_KEYS);
        found
    }
}

/// The decision log of one worker, its only writer.
#[derive(Debug)]
pub(super) struct DecisionLog {
    capacity: usize,
    pages: Mutex<LogPages>,
}

#[derive(Debug)]
struct LogPages {
    decisions: VecDeque<RememberedDecision>,
    /// Top keys by limit name.
    tops: Vec<(String, TopKeys)>,
    /// Start of the current second, and the decisions explained in it.
    second: Option<Instant>,
    explained: u32,
    /// Decisions explained this second, by the hash of the key.
    of_key: Box<[u8; KEYS_SEEN]>,
}

impl DecisionLog {
    fn new(capacity: usize) -> DecisionLog {
        DecisionLog {
            capacity,
            pages: Mutex::new(LogPages {
                decisions: VecDeque::new(),
                tops: Vec::new(),
                second: None,
                explained: 0,
                of_key: Box::new([0; KEYS_SEEN]),
            }),
        }
    }

    /// Whether the rate limits allow explaining another decision about this key.
    pub(super) fn may_explain(&self, now: Instant, key: Option<Key>) -> bool {
        let Ok(mut pages) = self.pages.try_lock() else {
            return false;
        };
        let is_over = |second: Instant| now.duration_since(second) >= Duration::from_secs(1);
        if pages.second.is_none_or(is_over) {
            pages.second = Some(now);
            pages.explained = 0;
            pages.of_key.fill(0);
        }
        let place = key.map_or(0, |Key(key)| key as usize % KEYS_SEEN);
        if self.capacity == 0
            || pages.explained >= EXPLAINED_PER_SECOND
            || pages.of_key[place] >= EXPLAINED_PER_KEY
        {
            return false;
        }
        pages.explained += 1;
        pages.of_key[place] += 1;
        true
    }

    pub(super) fn remember(&self, decision: RememberedDecision) {
        let Ok(mut pages) = self.pages.try_lock() else {
            return;
        };
        if pages.decisions.len() >= self.capacity {
            pages.decisions.pop_front();
        }
        pages.decisions.push_back(decision);
    }

    /// Counts a rejection of a key.
    pub(super) fn rejected(
        &self,
        limit: &str,
        key: Option<Key>,
        now: Instant,
        name: impl FnOnce() -> String,
    ) {
        let Ok(mut pages) = self.pages.try_lock() else {
            return;
        };
        let place = pages.tops.iter().position(|(known, _)| known == limit);
        let place = place.unwrap_or_else(|| {
            pages.tops.push((limit.to_owned(), TopKeys::default()));
            pages.tops.len() - 1
        });
        pages.tops[place].1.count(key, now, name);
    }

    /// Drops the keys of removed limits.
    pub(super) fn retain(&self, limits: impl Fn(&str) -> bool) {
        let mut pages = lock(&self.pages);
        pages.tops.retain(|(name, _)| limits(name));
    }
}

/// Picks the admissions to explain: one per `ADMISSION_PAUSE`.
#[derive(Debug, Default)]
pub(super) struct Admissions(std::cell::Cell<Option<Instant>>);

impl Admissions {
    #[inline]
    pub(super) fn is_next(&self, now: Instant) -> bool {
        let is_soon = |last: Instant| now.duration_since(last) < ADMISSION_PAUSE;
        if self.0.get().is_some_and(is_soon) {
            return false;
        }
        self.0.set(Some(now));
        true
    }
}

/// The most rejected keys: Unbiased Space Saving (Ting 2018). An unknown key increments the
/// smallest count, and replaces that key with probability 1/count. A flood of one-time keys thus
/// does not evict frequent keys.
#[derive(Debug, Default)]
struct TopKeys {
    counts: Vec<KeyCount>,
    began: Option<Instant>,
    /// State of a xorshift generator.
    random: u64,
}

#[derive(Debug)]
struct KeyCount {
    key: Option<Key>,
    name: String,
    /// Counts of the previous window and of the current one.
    before: u32,
    now: u32,
}

impl TopKeys {
    fn count(&mut self, key: Option<Key>, now: Instant, name: impl FnOnce() -> String) {
        self.turn(now);
        if let Some(known) = self.counts.iter_mut().find(|count| count.key == key) {
            known.now = known.now.saturating_add(1);
            return;
        }
        if self.counts.len() < TOP_KEYS {
            self.counts.push(KeyCount {
                key,
                name: name(),
                before: 0,
                now: 1,
            });
            return;
        }
        let chance = self.random();
        let weight = |count: &KeyCount| count.now.saturating_add(count.before);
        let Some(least) = self.counts.iter_mut().min_by_key(|count| weight(count)) else {
            return;
        };
        least.now = least.now.saturating_add(1);
        if chance.is_multiple_of(u64::from(weight(least))) {
            (least.key, least.name) = (key, name());
        }
    }

    /// Starts the next window if the current one is over.
    fn turn(&mut self, now: Instant) {
        let began = *self.began.get_or_insert(now);
        let age = now.duration_since(began);
        if age < WINDOW {
            return;
        }
        let is_next = age < WINDOW * 2;
        self.began = Some(if is_next { began + WINDOW } else { now });
        for count in &mut self.counts {
            count.before = if is_next { count.now } else { 0 };
            count.now = 0;
        }
        self.counts.retain(|count| count.before > 0);
    }

    /// The keys, with the previous window weighted by its overlap with the last minute.
    fn keys(&self, now: Instant) -> impl Iterator<Item = TopKey> {
        let age = self
            .began
            .map_or(Duration::ZERO, |began| now.duration_since(began));
        let windows = age.as_secs_f64() / WINDOW.as_secs_f64();
        let rejected = move |count: &KeyCount| match windows {
            ..1.0 => f64::from(count.now) + f64::from(count.before) * (1.0 - windows),
            1.0..2.0 => f64::from(count.now) * (2.0 - windows),
            _ => 0.0,
        };
        let keys = self.counts.iter().map(move |count| TopKey {
            name: count.name.clone(),
            key: count.key,
            rejected: rejected(count),
        });
        keys.filter(|top| top.rejected >= 0.5)
    }

    fn random(&mut self) -> u64 {
        let mut random = match self.random {
            0 => 0x9E37_79B9_7F4A_7C15,
            state => state,
        };
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        self.random = random;
        random
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn the_keys_that_are_rejected_most_stand_out_of_a_flood_of_others() {
        let (books, now) = (DecisionLogs::new(2), Instant::now());
        let workers = [books.open(), books.open()];
        let mut fresh = 1_000;
        for turn in 0..3_000_u128 {
            let worker = &workers[turn as usize % 2];
            let reject = |key: u128| {
                worker.rejected("a", Some(Key(key)), now, || key.to_string());
            };
            reject(1);
            if turn % 3 == 0 {
                reject(2);
            }
            for _ in 0..3 {
                fresh += 1;
                reject(fresh);
            }
        }
        let top = books.top("a", now);
        assert_eq!(top.len(), TOP_KEYS, "and no more, over all workers");
        assert_eq!([&*top[0].name, &*top[1].name], ["1", "2"]);
        assert!(
            top[0].rejected >= 3_000.0 && top[0].rejected < 3_600.0,
            "{top:?}"
        );
        assert!(books.top("b", now).is_empty());
        assert!(books.top("a", now + seconds(200)).is_empty(), "long ago");
    }

    #[test]
    fn rejections_fade_within_two_windows() {
        let (books, start) = (DecisionLogs::new(1), Instant::now());
        let worker = books.open();
        (0..100).for_each(|_| worker.rejected("a", None, start, || "all".to_owned()));
        let at = |after: u64| {
            books
                .top("a", start + seconds(after))
                .first()
                .map_or(0.0, |top| top.rejected)
        };
        assert_eq!([at(0), at(59), at(90), at(120)], [100.0, 100.0, 50.0, 0.0]);
        worker.rejected("a", None, start + seconds(61), || "all".to_owned());
        assert!((95.0..101.0).contains(&at(61)), "{}", at(61));
    }

    #[test]
    fn explanations_are_bounded_in_time_by_key_and_in_number() {
        let (books, now) = (DecisionLogs::new(4), Instant::now());
        let worker = books.open();
        let of_one = (0..100)
            .filter(|_| worker.may_explain(now, Some(Key(5))))
            .count();
        assert_eq!(of_one, usize::from(EXPLAINED_PER_KEY));
        let of_many = (0..10_000_u128)
            .filter(|key| worker.may_explain(now, Some(Key(*key))))
            .count();
        assert_eq!(of_many + of_one, EXPLAINED_PER_SECOND as usize);
        assert!(worker.may_explain(now + seconds(1), Some(Key(5))));
        for id in 0..5_000 {
            worker.remember(RememberedDecision {
                at: SystemTime::UNIX_EPOCH + seconds(id),
                request_id: id.to_string(),
                admitted: false,
                explanation: Arc::new(Explanation::nothing()),
            });
        }
        let kept = books.decisions(|_| true);
        assert_eq!((kept.len(), &*kept[0].request_id), (DECISIONS / 4, "4999"));
        assert_eq!(books.decisions(|one| one.request_id == "4990").len(), 1);
    }

    #[test]
    fn now_and_then_an_admission_is_explained() {
        let (admissions, now) = (Admissions::default(), Instant::now());
        assert!(admissions.is_next(now));
        assert!(!admissions.is_next(now + Duration::from_millis(249)));
        assert!(admissions.is_next(now + ADMISSION_PAUSE));
    }
}
