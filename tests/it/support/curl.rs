//! The real curl, the client that most people try first.

use std::process::Command;

use super::{
    cli::{Finished, finish},
    gateway::piped,
};

/// Runs `curl` quietly with these arguments and a time limit, and returns its output. Fails the
/// test if curl fails.
pub fn curl(arguments: &[&str]) -> String {
    let finished = try_curl(arguments);
    assert_eq!(finished.code, Some(0), "curl {arguments:?}: {finished}");
    finished.stdout
}

/// Like [`curl`], but returns failures too.
pub fn try_curl(arguments: &[&str]) -> Finished {
    let mut command = Command::new("curl");
    piped(&mut command)
        .args([
            "--silent",
            "--show-error",
            "--max-time",
            "10",
            "--noproxy",
            "*",
        ])
        .args(arguments);
    finish(&mut command, b"")
}
