//! Commands that end on their own: `tidegate check`, `curl`.

use std::{
    fmt,
    io::Write,
    path::Path,
    process::{Command, ExitStatus, Stdio},
    thread,
    time::{Duration, Instant},
};

use super::{
    gateway::piped,
    signal::signal,
    wait::{PATIENCE, time_passes},
};

/// The result of a command.
pub struct Finished {
    /// The exit code; `None` if a signal ended the process.
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl Finished {
    pub fn new(status: ExitStatus, stdout: String, stderr: String) -> Finished {
        Finished {
            code: status.code(),
            stdout,
            stderr,
        }
    }
}

impl fmt::Display for Finished {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "exit code {:?}\n── stdout ──\n{}── stderr ──\n{}",
            self.code, self.stdout, self.stderr
        )
    }
}

/// Runs `tidegate` with these arguments in a folder and waits until it ends.
pub fn tidegate(folder: &Path, arguments: &[&str]) -> Finished {
    finish(tidegate_command(folder).args(arguments), b"")
}

/// The binary under test, isolated from the developer's environment.
pub fn tidegate_command(folder: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    piped(&mut command).current_dir(folder);
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("TIDEGATE_") {
            command.env_remove(name);
        }
    }
    command
}

/// Runs a command with this input. A command that does not end in time is killed, and the test
/// fails.
pub fn finish(command: &mut Command, input: &[u8]) -> Finished {
    finish_within(PATIENCE, command, input)
}

/// Like [`finish`], with another patience.
pub fn finish_within(patience: Duration, command: &mut Command, input: &[u8]) -> Finished {
    let mut child = command
        .stdin(Stdio::piped())
        .spawn()
        .unwrap_or_else(|error| panic!("start {command:?}: {error}"));
    let mut stdin = child.stdin.take().expect("stdin is piped");
    let input = input.to_vec();
    // on a thread, because the child may not read, or may write more than a pipe holds before it
    // reads
    thread::spawn(move || stdin.write_all(&input));
    let pid = child.id();
    let waiting = thread::spawn(move || child.wait_with_output());
    let deadline = Instant::now() + patience;
    while !waiting.is_finished() {
        if Instant::now() > deadline {
            signal(pid, "KILL");
            panic!("{command:?} did not end within {patience:?}");
        }
        time_passes(Duration::from_millis(2), "the next poll is due");
    }
    let output = waiting
        .join()
        .expect("waiting does not panic")
        .expect("the output of a child is readable");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Finished::new(output.status, text(&output.stdout), text(&output.stderr))
}
