//! Triggers a reload when the content of the configuration, or of a file that it names, differs
//! from the running one.
//!
//! Compares contents every second, off the control thread. File notifications are not enough: a
//! ConfigMap swaps a symlink two folders up, a bind-mounted file never fires, and every editor
//! writes differently. A content must be found twice in a row to count, so a file that is still
//! being written is left alone. Certificates have their own watch
//! ([`certificates`](super::certificates)), which needs no reload.

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
    config::{self, Stamps, WrittenConfig},
    gateway::ActiveConfigHandle,
};

/// How often to read files with unchanged stamps anyway.
const READ: Duration = Duration::from_secs(60);
/// How often to check the files.
const POLL: Duration = Duration::from_secs(1);
/// How often to retry a rejected configuration: a missing address or file may be available by then.
const RETRY: Duration = Duration::from_secs(60);

/// Watches until the process ends; pauses while `watch_config` is false.
pub(super) async fn watch(
    file: PathBuf,
    current: Arc<ActiveConfigHandle>,
    reloads: mpsc::Sender<Reload>,
) {
    let mut ticks = tokio::time::interval(POLL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut watch = ConfigWatcher::default();
    let mut last: Option<FileStates> = None;
    loop {
        ticks.tick().await;
        let running = Arc::clone(current.active().snapshot());
        if !running.server.watch_config {
            watch = ConfigWatcher::default();
            continue;
        }
        let (path, snapshot) = (file.clone(), Arc::clone(&running));
        let before = last.take();
        // the disk may be slow, and this thread also handles signals
        let looked =
            tokio::task::spawn_blocking(move || FileStates::at(&path, &snapshot.written, before));
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
        // no answer counts as rejected, too
        watch.refused = !matches!(told.await, Ok(Ok(_)));
    }
}

/// The state of the files at one moment.
#[derive(Debug)]
struct FileStates {
    stamps: Stamps,
    /// Whether any later write must change the stamps.
    is_sure: bool,
    read: Instant,
    found: String,
}

impl FileStates {
    /// The content of the files now. Files with unchanged stamps are read only once a minute,
    /// since key files may be large.
    fn at(path: &Path, written: &WrittenConfig, before: Option<FileStates>) -> Option<FileStates> {
        let stamps = Stamps::of(path, written);
        let is_sure = stamps.are_old(SystemTime::now());
        match before {
            Some(last) if last.is_sure && last.stamps == stamps && last.read.elapsed() < READ => {
                Some(last)
            }
            _ => Some(FileStates {
                stamps,
                is_sure,
                read: Instant::now(),
                found: config::fingerprint(path, written)?,
            }),
        }
    }
}

/// The state of the watch.
#[derive(Debug, Default)]
struct ConfigWatcher {
    /// The content at the last look.
    seen: Option<String>,
    /// The content of the last reload attempt, and its time.
    tried: Option<(String, Instant)>,
    /// Whether that reload was rejected, with none succeeding since.
    refused: bool,
}

impl ConfigWatcher {
    fn wants_reload(&mut self, found: &str, running: &str, now: Instant) -> bool {
        let is_stable = self.seen.as_deref() == Some(found);
        if !is_stable {
            self.seen = Some(found.to_owned());
            return false;
        }
        let tried = self.tried.as_ref().filter(|(tried, _)| tried == found);
        let wanted = match tried {
            // after a rejected reload, reload the running content too: it resets the
            // metric
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
            let look = FileStates::at(&path, &WrittenConfig::default(), last.take())
                .expect("it is a file");
            let is = config::fingerprint(&path, &WrittenConfig::default());
            assert_eq!(Some(&look.found), is.as_ref());
            last = Some(look);
        }
    }

    #[test]
    fn what_nobody_touches_is_not_read_again() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("gateway.toml");
        std::fs::write(&path, "1").expect("it is written");
        let look =
            |last| FileStates::at(&path, &WrittenConfig::default(), last).expect("it is a file");
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
        let (mut watch, start) = (ConfigWatcher::default(), Instant::now());
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
        assert!(!look("broken", 5, true), "it was rejected");
        assert!(look("broken", 64, true), "a missing file may exist by now");
        assert!(!look("runs", 65, false));
        assert!(look("runs", 66, false), "reverted: no longer rejected");
        assert!(!look("runs", 67, false));
        assert!(!look("broken", 68, true));
        assert!(look("broken", 69, true), "again");
    }
}
