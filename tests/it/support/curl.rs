//! The real curl, the client that most people try first.

use std::{process::Command, time::Duration};

use super::{
    cli::{Finished, finish_within},
    gateway::piped,
    wait::PATIENCE,
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
    let time = arguments
        .iter()
        .rposition(|argument| *argument == "--max-time");
    let seconds = time.and_then(|at| arguments.get(at + 1)?.parse().ok());
    let patience = PATIENCE + Duration::from_secs(seconds.unwrap_or(10));
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
    finish_within(patience, &mut command, b"")
}
