//! Files into text, within a bound.

use std::{fs::File, io::Read, path::Path};

/// How to mend a file that cannot be read.
pub(super) const HINT: &str = "check the path and its permissions; a relative path starts at the folder of the configuration file";

/// The text of a file. The error is a phrase that continues "… cannot be read: ".
pub(super) fn text(path: &Path, max_bytes: u64) -> Result<String, String> {
    let bytes = bytes(path, max_bytes)?;
    String::from_utf8(bytes).map_err(|_| "it is not UTF-8".to_owned())
}

/// The bytes of a file, likewise.
pub(super) fn bytes(path: &Path, max_bytes: u64) -> Result<Vec<u8>, String> {
    let mut bytes = Vec::new();
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
