//! Asks for a reload when the configuration, or a file that it names, has another content than the one that runs.
//!
//! Contents are compared, every second and off the control thread. Notifications would not do instead: a ConfigMap swaps a link
//! two folders up, a file that is mounted by itself never fires, and editors write in as many ways as there are editors. What is
//! still being written is waited for: a content counts when two looks in a row have found it. Certificates have a watch of their
//! own ([`certificates`](super::certificates)), which needs no reload.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime},
};

use tokio::{
    sync::{mpsc, oneshot},
    time::{Instant, MissedTickBehavior},
};

use crate::{
    admin::Reload,
    config::{self, Stamps, Written},
    gateway::Current,
};

/// How often what was not touched is read all the same.
const READ: Duration = Duration::from_secs(60);
/// How often the files are looked at.
const POLL: Duration = Duration::from_secs(1);
/// How often what was refused is tried again: what it lacked (an address, another file) may be there by now.
const RETRY: Duration = Duration::from_secs(60);

/// Watches for as long as the process runs; looks away while `watch_config` is false.
pub(super) async fn watch(file: PathBuf, current: Arc<Current>, reloads: mpsc::Sender<Reload>) {
    let mut ticks = tokio::time::interval(POLL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut watch = Watch::default();
    let mut last: Option<Look> = None;
    loop {
        ticks.tick().await;
        let running = Arc::clone(current.shared().snapshot());
        if !running.server.watch_config {
            watch = Watch::default();
            continue;
        }
        let (path, snapshot) = (file.clone(), Arc::clone(&running));
        let before = last.take();
        // the disk may be slow, and signals are waited for on this thread
        let looked =
            tokio::task::spawn_blocking(move || Look::at(&path, &snapshot.written, before));
        let Ok(Some(look)) = looked.await else {
            continue;
        };
        let found = last.insert(look).found.clone();
        if !watch.wants_reload(&found, &running.hash, Instant::now()) {
            continue;
        }
        let (answer, told) = oneshot::channel();
        let why = format!("{} or a file that it names has changed", file.display());
        if reloads.send(Reload { why, answer }).await.is_err() {
            return;
        }
        // refused is also what nobody answers
        watch.refused = !matches!(told.await, Ok(Ok(_)));
    }
}

/// The files as they were at some moment.
#[derive(Debug)]
struct Look {
    stamps: Stamps,
    /// Nothing can have been written since without another stamp.
    is_sure: bool,
    read: Instant,
    found: String,
}

impl Look {
    /// What the files hold now. Those that nobody has touched are read once a minute only: key files may be large.
    fn at(path: &Path, written: &Written, before: Option<Look>) -> Option<Look> {
        let stamps = Stamps::of(path, written);
        let is_sure = stamps.are_old(SystemTime::now());
        match before {
            Some(last) if last.is_sure && last.stamps == stamps && last.read.elapsed() < READ => {
                Some(last)
            }
            _ => Some(Look {
                stamps,
                is_sure,
                read: Instant::now(),
                found: config::fingerprint(path, written)?,
            }),
        }
    }
}

/// What the watch knows.
#[derive(Debug, Default)]
struct Watch {
    /// Found by the last look.
    seen: Option<String>,
    /// What a reload was last asked for, and when.
    tried: Option<(String, Instant)>,
    /// It was refused, and nothing has been loaded by this watch since.
    refused: bool,
}

impl Watch {
    fn wants_reload(&mut self, found: &str, running: &str, now: Instant) -> bool {
        let is_stable = self.seen.as_deref() == Some(found);
        if !is_stable {
            self.seen = Some(found.to_owned());
            return false;
        }
        let tried = self.tried.as_ref().filter(|(tried, _)| tried == found);
        let wanted = match tried {
            // back to what runs: the refusal is over, and the metric is to say so
            None => found != running || self.refused,
            Some((_, at)) => self.refused && found != running && now.duration_since(*at) >= RETRY,
        };
        if wanted {
            self.tried = Some((found.to_owned(), now));
        } else if found == running {
            self.tried = None;
            self.refused = false;
        }
        wanted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_at_once_after_a_look_is_seen_though_its_size_is_the_same() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("gateway.toml");
        let mut last = None;
        for round in 0..50 {
            std::fs::write(&path, format!("{:02}", round % 7)).expect("it is written");
            let look = Look::at(&path, &Written::default(), last.take()).expect("it is a file");
            let is = config::fingerprint(&path, &Written::default());
            assert_eq!(Some(&look.found), is.as_ref());
            last = Some(look);
        }
    }

    #[test]
    fn what_nobody_touches_is_not_read_again() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("gateway.toml");
        std::fs::write(&path, "1").expect("it is written");
        let look = |last| Look::at(&path, &Written::default(), last).expect("it is a file");
        let mut first = look(None);
        assert!(!first.is_sure, "it was written just now");
        first.is_sure = true;
        let read = first.read;
        let second = look(Some(first));
        assert_eq!(second.read, read);
        std::fs::write(&path, "22").expect("it is written");
        assert!(look(Some(second)).read > read);
    }

    #[test]
    fn a_content_counts_when_it_stays_and_is_tried_once_then_every_minute() {
        let (mut watch, start) = (Watch::default(), Instant::now());
        let mut look = |found: &str, after: u64, refused: bool| {
            let wanted = watch.wants_reload(found, "runs", start + Duration::from_secs(after));
            if wanted {
                watch.refused = refused;
            }
            wanted
        };
        assert!(!look("runs", 0, false));
        assert!(!look("runs", 1, false));
        assert!(!look("half", 2, false), "still being written");
        assert!(!look("broken", 3, true));
        assert!(look("broken", 4, true), "it stays");
        assert!(!look("broken", 5, true), "it was refused");
        assert!(look("broken", 64, true), "what it lacked may be there");
        assert!(!look("runs", 65, false));
        assert!(look("runs", 66, false), "taken back: no longer refused");
        assert!(!look("runs", 67, false));
        assert!(!look("broken", 68, true));
        assert!(look("broken", 69, true), "again");
    }
}
