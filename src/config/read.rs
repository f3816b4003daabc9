//! Reads files, up to a size bound.

use std::{
    cell::RefCell,
    collections::BTreeMap,
    fs::{self, File},
    io::Read,
    path::{Path, PathBuf},
};

use sha2::{Digest, Sha256};

/// The hint for a file that cannot be read.
pub(super) const HINT: &str = "check the path and its permissions; relative paths start at the folder of the configuration file";

/// Paths of file descriptors that the process inherited.
const OPENED: [&str; 3] = ["/dev/stdin", "/dev/fd", "/proc/self/fd"];

/// The files that a configuration names, each with a hash of its content. A change to one of them
/// is a change to the configuration.
#[derive(Debug, Default)]
pub(super) struct ConfigFiles {
    seen: RefCell<BTreeMap<PathBuf, String>>,
}

impl ConfigFiles {
    /// The text of a file. The error continues the sentence "… cannot be read: ".
    pub(super) fn text(&self, path: &Path, max_bytes: u64) -> Result<String, String> {
        let bytes = self.bytes(path, max_bytes)?;
        String::from_utf8(bytes).map_err(|_| "it is not UTF-8".to_owned())
    }

    /// The bytes of a file, likewise.
    pub(super) fn bytes(&self, path: &Path, max_bytes: u64) -> Result<Vec<u8>, String> {
        let bytes = bytes(path, max_bytes);
        let hash = short_hash([bytes.as_deref().unwrap_or_default()]);
        self.seen.borrow_mut().insert(path.to_owned(), hash);
        bytes
    }

    pub(super) fn seen(&self) -> BTreeMap<PathBuf, String> {
        self.seen.borrow().clone()
    }
}

/// A short hash of a configuration's text and of the files that it names.
pub(super) fn hash(text: &[u8], files: &BTreeMap<PathBuf, String>) -> String {
    let files = files.values().map(String::as_bytes);
    short_hash(std::iter::once(text).chain(files))
}

/// The first 8 bytes of a SHA-256, in hex: enough to distinguish two texts.
pub(super) fn short_hash<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> String {
    let mut hash = Sha256::new();
    parts.into_iter().for_each(|part| hash.update(part));
    let digest = hash.finalize();
    let half = digest.iter().take(8);
    half.map(|byte| format!("{byte:02x}")).collect()
}

/// Reads a file that the configuration names: a regular file of at most 4 MiB. The error continues
/// the sentence "… cannot be read: ".
pub fn read_file(path: &Path) -> Result<Vec<u8>, String> {
    const MAX_BYTES: u64 = 4 << 20;
    bytes(path, MAX_BYTES)
}

/// The bytes of a file. The error continues the sentence "… cannot be read: ". Reads only regular
/// files, since opening a named pipe could block forever. Inherited pipes (`/dev/stdin`, `<(…)`)
/// are read: naming one is deliberate.
pub(super) fn bytes(path: &Path, max_bytes: u64) -> Result<Vec<u8>, String> {
    let mut bytes = Vec::new();
    let kind = fs::metadata(path).map_err(|error| error.to_string())?;
    let is_opened = OPENED.iter().any(|folder| path.starts_with(folder));
    if !(kind.is_file() || is_opened && !kind.is_dir()) {
        let what = if kind.is_dir() {
            "a folder"
        } else {
            "not a regular file"
        };
        return Err(format!("it is {what}"));
    }
    let read = File::open(path).and_then(|file| {
        file.take(max_bytes.saturating_add(1))
            .read_to_end(&mut bytes)
    });
    read.map_err(|error| error.to_string())?;
    if bytes.len() as u64 > max_bytes {
        return Err(format!("it is larger than {max_bytes} bytes"));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_named_pipe_is_refused_at_once() {
        let folder = tempfile::tempdir().expect("a folder");
        let pipe = folder.path().join("pipe");
        let made = std::process::Command::new("mkfifo").arg(&pipe).status();
        assert!(made.is_ok_and(|status| status.success()));
        assert_eq!(bytes(&pipe, 10), Err("it is not a regular file".to_owned()));
        assert_eq!(bytes(folder.path(), 10), Err("it is a folder".to_owned()));
    }

    #[test]
    fn a_file_is_read_up_to_its_bound() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("file");
        fs::write(&path, "0123456789").expect("it is written");
        assert_eq!(
            ConfigFiles::default().text(&path, 10).as_deref(),
            Ok("0123456789")
        );
        assert!(
            ConfigFiles::default()
                .text(&path, 9)
                .is_err_and(|error| error.contains("larger"))
        );
    }
}
