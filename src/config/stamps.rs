//! Tells whether the files of a configuration have changed since they were loaded.

use std::{
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    time::SystemTime,
};

use super::{read, written::WrittenConfig};

/// Identity, size and change time of the files of a configuration. Equal stamps mean that nothing
/// was written since, within the file system's clock resolution. Costs one system call per file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stamps(Vec<Option<[i64; 5]>>);

impl Stamps {
    /// The current stamps of `path` and of the files in `written`.
    pub fn of(path: &Path, written: &WrittenConfig) -> Stamps {
        let files = written.files.keys().map(PathBuf::as_path);
        let stamp = |path: &Path| {
            let is = path.metadata().ok()?;
            let changed = [is.ctime(), is.ctime_nsec()];
            let which = [is.dev() as i64, is.ino() as i64, is.len() as i64];
            Some([which[0], which[1], which[2], changed[0], changed[1]])
        };
        Stamps(std::iter::once(path).chain(files).map(stamp).collect())
    }

    /// Whether the last change is so old that a new one must get a different time.
    pub fn are_old(&self, now: SystemTime) -> bool {
        const GRAIN_SECONDS: i64 = 2;
        let now = now.duration_since(SystemTime::UNIX_EPOCH);
        let now = now.map_or(0, |since| since.as_secs() as i64);
        let mut changes = self.0.iter().flatten();
        changes.all(|[.., seconds, _]| (GRAIN_SECONDS..).contains(&(now - seconds)))
    }
}

/// The hash of the snapshot that loading would compute from the files on disk now, if the file
/// still names the files in `written`. `None` if it is not a regular file: a pipe cannot be read
/// twice.
pub fn fingerprint(path: &Path, written: &WrittenConfig) -> Option<String> {
    const MAX_BYTES: u64 = 64 << 20;
    let kind = path.metadata().ok();
    if kind.is_some_and(|kind| !kind.is_file()) {
        return None;
    }
    let files = read::ConfigFiles::default();
    for path in written.files.keys() {
        // an unreadable file hashes as empty, as it does in `load`
        let _ = files.bytes(path, MAX_BYTES);
    }
    let text = read::bytes(path, MAX_BYTES).unwrap_or_default();
    Some(read::hash(&text, &files.seen()))
}
