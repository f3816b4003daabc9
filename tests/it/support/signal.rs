//! Sends signals by name.

use std::process::Command;

/// Sends a signal by name, such as `TERM`, to a process that the test started.
pub fn signal(pid: u32, name: &str) {
    let sent = Command::new("sh")
        .args(["-c", &format!("kill -{name} {pid}")])
        .status();
    assert!(
        sent.is_ok_and(|status| status.success()),
        "kill -{name} {pid}"
    );
}
