//! The real curl, as the client that most people try first.

use std::process::Command;

use super::{
    cli::{Finished, finish},
    gateway::piped,
};

/// Runs `curl` with these arguments, quietly and with a bound on its time, and returns what it printed.
pub fn curl(arguments: &[&str]) -> String {
    let finished = try_curl(arguments);
    assert_eq!(finished.code, Some(0), "curl {arguments:?}: {finished}");
    finished.stdout
}

/// The same, however it ends.
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
