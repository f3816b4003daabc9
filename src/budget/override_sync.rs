//! Synchronizes operators' runtime overrides between gateways: a hash in Redis to which each
//! gateway posts and which each polls.
//!
//! ```text
//!   operator ─▶ gateway A ── post ──▶ hash in Redis ◀── poll, every [`POLL`] ── gateways B, C, …
//! ```
//!
//! This module treats subjects and values as opaque texts. A failed post is retried with every
//! poll, so an override survives a Redis outage; the newest post of a subject wins. **Bounds:**
//! [`SUBJECTS_MAX`] subjects in the hash, [`UNPOSTED_MAX`] waiting posts. Other gateways receive a
//! post within [`POLL`] and a call.
//!
//! **Order.** An override and its post are one atomic step. So is reading the hash together with
//! merging the posts made meanwhile. Otherwise an older entry could undo an override made during
//! the read.
//!
//! When the hash is new to a gateway, or was lost and created again, every gateway posts its
//! overrides again.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use redis::Value;
use tokio::{sync::mpsc, time::MissedTickBehavior};

use super::{
    cluster::ClusterServers,
    redis::{RedisTarget, RedisTimeouts, Script, ScriptCall},
};

/// Polling interval of the hash.
const POLL: Duration = Duration::from_secs(2);
/// Most subjects in the hash.
const SUBJECTS_MAX: usize = 10_000;
/// Most subjects waiting to be posted.
const UNPOSTED_MAX: usize = 2_000;
/// Most posts queued for the task.
const QUEUE: usize = 256;

/// One override to share with all gateways.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OverrideEntry {
    /// The subject of the override; a newer entry with the same subject replaces it.
    pub subject: String,
    /// `None` deletes it.
    pub value: Option<String>,
    /// Expiry in milliseconds since 1970; 0 is never.
    pub until_ms: u64,
}

/// All valid entries, by subject.
pub type OverrideSnapshot = BTreeMap<String, String>;

/// Called with the entries when they have changed. `is_news` means that the hash is new, so a
/// missing entry does not mean a deleted one. Returns what to post.
pub struct OverrideReader(Box<dyn FnMut(OverrideSnapshot, bool) -> Vec<OverrideEntry> + Send>);

impl OverrideReader {
    /// Wraps the callback.
    pub fn new(
        read: impl FnMut(OverrideSnapshot, bool) -> Vec<OverrideEntry> + Send + 'static,
    ) -> OverrideReader {
        OverrideReader(Box::new(read))
    }
}

impl fmt::Debug for OverrideReader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Reader")
    }
}

/// Handle for posting overrides.
#[derive(Clone, Debug)]
pub struct OverrideSync {
    posts: mpsc::Sender<OverrideEntry>,
    order: SyncOrder,
}

/// The posts for the task that syncs the hash.
#[derive(Debug)]
pub(super) struct OverrideQueue {
    posts: mpsc::Receiver<OverrideEntry>,
    order: SyncOrder,
}

/// Locked while an override is made and posted, and while entries are read and merged.
#[derive(Clone, Debug, Default)]
struct SyncOrder(Arc<Mutex<()>>);

impl SyncOrder {
    fn hold(&self) -> MutexGuard<'_, ()> {
        // the lock protects no data that a panic could leave inconsistent
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl OverrideSync {
    /// Creates a handle and its queue.
    pub(super) fn new() -> (OverrideSync, OverrideQueue) {
        let (board, posts) = mpsc::channel(QUEUE);
        let order = SyncOrder::default();
        let handed_in = OverrideQueue {
            posts,
            order: order.clone(),
        };
        (
            OverrideSync {
                posts: board,
                order,
            },
            handed_in,
        )
    }

    /// Applies an override and queues its post, which is sent as soon as Redis accepts it; false if
    /// too many posts are waiting. Blocks while entries are merged: milliseconds if there are many.
    pub fn post<E>(&self, rule: impl FnOnce() -> Result<OverrideEntry, E>) -> Result<bool, E> {
        let _order = self.order.hold();
        let entry = rule()?;
        Ok(self.posts.try_send(entry).is_ok())
    }
}

impl OverrideQueue {
    /// Passes the entries to the reader, if there is one, after merging the newer posts queued
    /// since. Overrides made from now on come later. What remains to be posted goes to `unposted`.
    fn take_over(
        &mut self,
        mut posted: OverrideSnapshot,
        reader: Option<(&mut OverrideReader, bool)>,
        unposted: &mut BTreeMap<String, OverrideEntry>,
    ) {
        let _order = self.order.hold();
        while let Ok(entry) = self.posts.try_recv() {
            match entry.value.clone() {
                Some(value) => posted.insert(entry.subject.clone(), value),
                None => posted.remove(&entry.subject),
            };
            keep(unposted, entry);
        }
        if let Some((reader, is_news)) = reader {
            for entry in (reader.0)(posted, is_news) {
                keep(unposted, entry);
            }
        }
    }
}

/// Which servers store the hash, and which reader receives it.
pub(super) struct OverrideSyncConfig {
    pub(super) target: RedisTarget,
    pub(super) timeouts: RedisTimeouts,
    pub(super) prefix: String,
    pub(super) reader: OverrideReader,
}

/// Posts and polls until every posting handle is dropped.
pub(super) async fn serve(config: OverrideSyncConfig, mut posts: OverrideQueue) {
    let servers = ClusterServers::new(&config.target, config.timeouts);
    let script = Script::new(include_str!("board.lua"));
    let key = format!("{}:{{board}}", config.prefix);
    let mut reader = config.reader;
    let mut read: Option<String> = None;
    let mut unposted: BTreeMap<String, OverrideEntry> = BTreeMap::new();
    let mut ticks = tokio::time::interval(POLL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = ticks.tick() => {}
            entry = posts.posts.recv() => match entry {
                Some(entry) => keep(&mut unposted, entry),
                None => return,
            },
        }
        while let Ok(entry) = posts.posts.try_recv() {
            keep(&mut unposted, entry);
        }
        let mut arguments = vec![read.clone().unwrap_or_default(), SUBJECTS_MAX.to_string()];
        for entry in unposted.values() {
            let until = entry.value.as_ref().map(|_| entry.until_ms.to_string());
            arguments.extend([
                entry.subject.clone(),
                until.unwrap_or_else(|| "-1".to_owned()),
                entry.value.clone().unwrap_or_default(),
            ]);
        }
        let Some((state, posted)) = look(&servers, &script, &key, &arguments).await else {
            continue;
        };
        unposted.clear();
        let board = |state: &str| state.split('-').next().map(str::to_owned);
        let is_news = read
            .as_deref()
            .is_none_or(|read| board(read) != board(&state));
        let is_other = read.as_ref() != Some(&state);
        let reading = is_other.then_some((&mut reader, is_news));
        posts.take_over(posted, reading, &mut unposted);
        read = Some(state);
        if !unposted.is_empty() {
            ticks.reset_immediately();
        }
    }
}

fn keep(unposted: &mut BTreeMap<String, OverrideEntry>, entry: OverrideEntry) {
    if unposted.len() < UNPOSTED_MAX || unposted.contains_key(&entry.subject) {
        unposted.insert(entry.subject.clone(), entry);
    }
}

/// The state of the hash, and its entries if the state has changed; `None` if Redis does not
/// answer.
async fn look(
    servers: &ClusterServers,
    script: &Script,
    key: &str,
    arguments: &[String],
) -> Option<(String, OverrideSnapshot)> {
    let arguments: Vec<Vec<u8>> = arguments
        .iter()
        .map(|argument| argument.clone().into_bytes())
        .collect();
    match servers.call(script, ScriptCall::new(key, &arguments)).await {
        Ok(Value::Array(reply)) => {
            let texts = reply
                .into_iter()
                .map(|text| redis::from_redis_value::<String>(text).ok());
            let mut texts: Vec<String> = texts.collect::<Option<_>>()?;
            let (pairs, _) = texts.get(1..)?.as_chunks::<2>();
            let posted = pairs.iter().cloned();
            let posted = posted.map(|[subject, value]| (subject, value)).collect();
            Some((texts.swap_remove(0), posted))
        }
        Ok(_) => None,
        Err(_) => {
            // if the server of this key is gone, another may have taken over
            servers.refresh().await;
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        convert::Infallible,
        sync::mpsc::{Receiver, sync_channel},
        thread,
    };

    use super::*;

    const SUBJECT: &str = "limit a";

    fn entry() -> Result<OverrideEntry, Infallible> {
        Ok(OverrideEntry {
            subject: SUBJECT.to_owned(),
            value: Some("off".to_owned()),
            until_ms: 0,
        })
    }

    /// Long enough for an unblocked thread to finish.
    fn waits(whether: &Receiver<()>) -> bool {
        whether.recv_timeout(Duration::from_millis(200)).is_err()
    }

    #[test]
    fn what_is_ruled_while_the_board_is_taken_over_comes_after_what_was_on_it() {
        let (board, mut posts) = OverrideSync::new();
        let here = Arc::new(Mutex::new(String::new()));
        let (operators, operator) = sync_channel(1);
        let set = |here: &Mutex<String>, value: &str| {
            *here.lock().expect("no thread panics") = value.to_owned();
        };
        let read = Arc::clone(&here);
        let mut reader = OverrideReader::new(move |posted, _| {
            let (board, here) = (board.clone(), Arc::clone(&read));
            let (changing, changed) = sync_channel(1);
            let rules = move || {
                board.post(|| {
                    set(&here, "off");
                    // the receiver may have stopped waiting
                    let _ = changing.send(());
                    entry()
                })
            };
            operators
                .send(thread::spawn(rules))
                .expect("the test waits");
            assert!(
                waits(&changed),
                "the override was applied in the middle of an atomic step"
            );
            set(&read, posted.get(SUBJECT).map_or("as configured", |on| on));
            Vec::new()
        });
        let mut unposted = BTreeMap::new();
        posts.take_over(
            OverrideSnapshot::new(),
            Some((&mut reader, false)),
            &mut unposted,
        );
        let operator = operator.recv().expect("it was started");
        assert_eq!(operator.join().expect("no panic"), Ok(true));
        assert_eq!(*here.lock().expect("no thread panics"), "off");
        assert!(unposted.is_empty(), "the next poll posts it");
    }

    #[test]
    fn what_was_ruled_before_is_taken_over_with_what_is_on_the_board() {
        let (board, mut posts) = OverrideSync::new();
        let mut reading = None;
        let is_posted = board.post(|| {
            let (done, is_done) = sync_channel(1);
            reading = Some(thread::spawn(move || {
                let (seen, all) = sync_channel(1);
                let mut reader = OverrideReader::new(move |posted, _| {
                    seen.send(posted).expect("it is waited for");
                    Vec::new()
                });
                let mut unposted = BTreeMap::new();
                posts.take_over(
                    OverrideSnapshot::new(),
                    Some((&mut reader, false)),
                    &mut unposted,
                );
                // the receiver may have stopped waiting
                let _ = done.send(());
                (all.recv().expect("it was read"), unposted.len())
            }));
            assert!(
                waits(&is_done),
                "the entries were read in the middle of an atomic step"
            );
            entry()
        });
        assert_eq!(is_posted, Ok(true));
        let reading = reading.map(thread::JoinHandle::join);
        let (seen, unposted) = reading.expect("it was started").expect("no panic");
        assert_eq!(seen.get(SUBJECT).map(String::as_str), Some("off"));
        assert_eq!(unposted, 1);
    }
}
