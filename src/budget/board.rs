//! What operators have ruled, for all gateways that share a Redis: posted on one board, which each gateway polls.
//!
//! ```text
//!   operator ─▶ gateway A ── post ──▶ board (a hash in Redis) ◀── poll, every [`POLL`] ── gateways B, C, …
//! ```
//!
//! What this module carries it does not understand: subjects and values are texts. A post that does not get through is tried
//! again with every poll, so that a ruling outlives the time without Redis; the newest of a subject stays. **Bounds:** [`SUBJECTS_MAX`]
//! subjects on the board, [`UNPOSTED_MAX`] that wait to be posted. Others hear of a post within [`POLL`] and a call.
//!
//! Where the board is new to a gateway, or has lost what was on it (it is another one), everybody posts what it knows again.

use std::{collections::BTreeMap, fmt, time::Duration};

use redis::Value;
use tokio::{sync::mpsc, time::MissedTickBehavior};

use super::{
    cluster::Servers,
    redis::{Patience, Script, Target},
};

/// How often the board is looked at.
const POLL: Duration = Duration::from_secs(2);
/// Subjects on the board.
const SUBJECTS_MAX: usize = 10_000;
/// Subjects that wait to be posted.
const UNPOSTED_MAX: usize = 2_000;
/// Posts that may wait for the board's task to wake.
const QUEUE: usize = 256;

/// Something that all gateways should know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notice {
    /// What it is about; another one about the same replaces it.
    pub subject: String,
    /// `None` takes it back.
    pub value: Option<String>,
    /// Milliseconds since 1970 after which nobody needs to know any more; 0 is never.
    pub until_ms: u64,
}

/// What is on the board, by subject.
pub type Posted = BTreeMap<String, String>;

/// Told what is on the board, when it is not what it was; `is_news` when that says nothing about what is missing there. Says
/// what to post.
pub struct Reader(Box<dyn FnMut(Posted, bool) -> Vec<Notice> + Send>);

impl Reader {
    /// A reader.
    pub fn new(read: impl FnMut(Posted, bool) -> Vec<Notice> + Send + 'static) -> Reader {
        Reader(Box::new(read))
    }
}

impl fmt::Debug for Reader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Reader")
    }
}

/// Where notices are handed in.
#[derive(Clone, Debug)]
pub struct Board(mpsc::Sender<Notice>);

impl Board {
    /// A board, and what is handed in there.
    pub(super) fn new() -> (Board, mpsc::Receiver<Notice>) {
        let (board, posts) = mpsc::channel(QUEUE);
        (Board(board), posts)
    }

    /// Posts something, as soon as Redis takes it; false where too much waits already.
    pub fn post(&self, notice: Notice) -> bool {
        self.0.try_send(notice).is_ok()
    }
}

/// Where the board is, and who reads it.
pub(super) struct Duty {
    pub(super) target: Target,
    pub(super) patience: Patience,
    pub(super) prefix: String,
    pub(super) reader: Reader,
}

/// Posts and polls until nobody can hand anything in any more.
pub(super) async fn serve(duty: Duty, mut posts: mpsc::Receiver<Notice>) {
    let servers = Servers::new(&duty.target, duty.patience);
    let script = Script::new(include_str!("board.lua"));
    let key = format!("{}:{{board}}", duty.prefix);
    let mut reader = duty.reader;
    let mut read: Option<String> = None;
    let mut unposted: BTreeMap<String, Notice> = BTreeMap::new();
    let mut ticks = tokio::time::interval(POLL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = ticks.tick() => {}
            notice = posts.recv() => match notice {
                Some(notice) => keep(&mut unposted, notice),
                None => return,
            },
        }
        while let Ok(notice) = posts.try_recv() {
            keep(&mut unposted, notice);
        }
        let mut arguments = vec![read.clone().unwrap_or_default(), SUBJECTS_MAX.to_string()];
        for notice in unposted.values() {
            let until = notice.value.as_ref().map(|_| notice.until_ms.to_string());
            arguments.extend([
                notice.subject.clone(),
                until.unwrap_or_else(|| "-1".to_owned()),
                notice.value.clone().unwrap_or_default(),
            ]);
        }
        let Some((state, mut posted)) = look(&servers, &script, &key, &arguments).await else {
            continue;
        };
        unposted.clear();
        // what was handed in meanwhile is newer than what was read
        while let Ok(notice) = posts.try_recv() {
            match notice.value.clone() {
                Some(value) => posted.insert(notice.subject.clone(), value),
                None => posted.remove(&notice.subject),
            };
            keep(&mut unposted, notice);
        }
        let board = |state: &str| state.split('-').next().map(str::to_owned);
        let is_news = read
            .as_deref()
            .is_none_or(|read| board(read) != board(&state));
        if read.as_ref() != Some(&state) {
            for notice in (reader.0)(posted, is_news) {
                keep(&mut unposted, notice);
            }
        }
        read = Some(state);
        if !unposted.is_empty() {
            ticks.reset_immediately();
        }
    }
}

fn keep(unposted: &mut BTreeMap<String, Notice>, notice: Notice) {
    if unposted.len() < UNPOSTED_MAX || unposted.contains_key(&notice.subject) {
        unposted.insert(notice.subject.clone(), notice);
    }
}

/// The state of the board, and what is on it if that is another than was read; `None` where Redis does not say.
async fn look(
    servers: &Servers,
    script: &Script,
    key: &str,
    arguments: &[String],
) -> Option<(String, Posted)> {
    match servers.call(script, key, arguments).await {
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
            // where the server that kept it is gone, another may by now
            servers.refresh().await;
            None
        }
    }
}
