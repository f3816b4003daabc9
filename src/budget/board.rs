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
//! **Order.** A ruling and its post are one step, and so is what is taken over from the board with what was posted meanwhile:
//! otherwise a ruling that is made while the board is read would be undone by what was on the board before it.
//!
//! Where the board is new to a gateway, or has lost what was on it (it is another one), everybody posts what it knows again.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use redis::Value;
use tokio::{sync::mpsc, time::MissedTickBehavior};

use super::{
    cluster::Servers,
    redis::{Patience, Script, ScriptCall, Target},
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
pub struct Board {
    posts: mpsc::Sender<Notice>,
    order: Order,
}

/// What is handed in, for the board's task.
#[derive(Debug)]
pub(super) struct Posts {
    posts: mpsc::Receiver<Notice>,
    order: Order,
}

/// Held by whoever rules and posts, and by whoever takes over what is on the board.
#[derive(Clone, Debug, Default)]
struct Order(Arc<Mutex<()>>);

impl Order {
    fn hold(&self) -> MutexGuard<'_, ()> {
        // it guards nothing that could be half done
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Board {
    /// A board, and what is handed in there.
    pub(super) fn new() -> (Board, Posts) {
        let (board, posts) = mpsc::channel(QUEUE);
        let order = Order::default();
        let handed_in = Posts {
            posts,
            order: order.clone(),
        };
        (
            Board {
                posts: board,
                order,
            },
            handed_in,
        )
    }

    /// Rules, and posts what was ruled, as soon as Redis takes it; false where too much waits already. Waits while what is
    /// on the board is taken over: milliseconds, where there is much.
    pub fn post<E>(&self, rule: impl FnOnce() -> Result<Notice, E>) -> Result<bool, E> {
        let _order = self.order.hold();
        let notice = rule()?;
        Ok(self.posts.try_send(notice).is_ok())
    }
}

impl Posts {
    /// Takes over what was on the board, where there is a reader for it: with what was handed in since, which is newer. What
    /// is ruled from now on comes after. What is to be posted goes to `unposted`.
    fn take_over(
        &mut self,
        mut posted: Posted,
        reader: Option<(&mut Reader, bool)>,
        unposted: &mut BTreeMap<String, Notice>,
    ) {
        let _order = self.order.hold();
        while let Ok(notice) = self.posts.try_recv() {
            match notice.value.clone() {
                Some(value) => posted.insert(notice.subject.clone(), value),
                None => posted.remove(&notice.subject),
            };
            keep(unposted, notice);
        }
        if let Some((reader, is_news)) = reader {
            for notice in (reader.0)(posted, is_news) {
                keep(unposted, notice);
            }
        }
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
pub(super) async fn serve(duty: Duty, mut posts: Posts) {
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
            notice = posts.posts.recv() => match notice {
                Some(notice) => keep(&mut unposted, notice),
                None => return,
            },
        }
        while let Ok(notice) = posts.posts.try_recv() {
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
            // where the server that kept it is gone, another may by now
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

    fn notice() -> Result<Notice, Infallible> {
        Ok(Notice {
            subject: SUBJECT.to_owned(),
            value: Some("off".to_owned()),
            until_ms: 0,
        })
    }

    /// Long enough for a thread that nothing holds up.
    fn waits(whether: &Receiver<()>) -> bool {
        whether.recv_timeout(Duration::from_millis(200)).is_err()
    }

    #[test]
    fn what_is_ruled_while_the_board_is_taken_over_comes_after_what_was_on_it() {
        let (board, mut posts) = Board::new();
        let here = Arc::new(Mutex::new(String::new()));
        let (operators, operator) = sync_channel(1);
        let set = |here: &Mutex<String>, ruling: &str| {
            *here.lock().expect("nobody panics") = ruling.to_owned();
        };
        let read = Arc::clone(&here);
        let mut reader = Reader::new(move |posted, _| {
            let (board, here) = (board.clone(), Arc::clone(&read));
            let (ruling, ruled) = sync_channel(1);
            let rules = move || {
                board.post(|| {
                    set(&here, "off");
                    // whoever reads may have given up waiting for it
                    let _ = ruling.send(());
                    notice()
                })
            };
            operators
                .send(thread::spawn(rules))
                .expect("the test waits");
            assert!(waits(&ruled), "it is ruled between two steps of one");
            set(&read, posted.get(SUBJECT).map_or("as configured", |on| on));
            Vec::new()
        });
        let mut unposted = BTreeMap::new();
        posts.take_over(Posted::new(), Some((&mut reader, false)), &mut unposted);
        let operator = operator.recv().expect("it was started");
        assert_eq!(operator.join().expect("no panic"), Ok(true));
        assert_eq!(*here.lock().expect("nobody panics"), "off");
        assert!(unposted.is_empty(), "it is posted with the next look");
    }

    #[test]
    fn what_was_ruled_before_is_taken_over_with_what_is_on_the_board() {
        let (board, mut posts) = Board::new();
        let mut reading = None;
        let is_posted = board.post(|| {
            let (done, is_done) = sync_channel(1);
            reading = Some(thread::spawn(move || {
                let (seen, all) = sync_channel(1);
                let mut reader = Reader::new(move |posted, _| {
                    seen.send(posted).expect("it is waited for");
                    Vec::new()
                });
                let mut unposted = BTreeMap::new();
                posts.take_over(Posted::new(), Some((&mut reader, false)), &mut unposted);
                // whoever rules may have given up waiting for it
                let _ = done.send(());
                (all.recv().expect("it was read"), unposted.len())
            }));
            assert!(waits(&is_done), "it is read between two steps of one");
            notice()
        });
        assert_eq!(is_posted, Ok(true));
        let reading = reading.map(thread::JoinHandle::join);
        let (seen, unposted) = reading.expect("it was started").expect("no panic");
        assert_eq!(seen.get(SUBJECT).map(String::as_str), Some("off"));
        assert_eq!(unposted, 1);
    }
}
