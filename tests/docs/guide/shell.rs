//! The shell in which the commands of a guide run, and its servers in the background.

use std::{
    collections::BTreeMap,
    fs::{self, File, Permissions},
    io::{self, BufRead, BufReader, Write},
    net::TcpListener,
    os::unix::{fs::PermissionsExt, process::CommandExt},
    path::Path,
    process::{self, Child, ChildStdin, ChildStdout, Stdio},
    sync::{
        atomic::{AtomicU16, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process_group};
use tempfile::TempDir;

use super::page::{Command, Ports};

/// How long a state may take. A machine under load is slow; nothing waits this long without a defect.
const PATIENCE: Duration = Duration::from_secs(60);
/// Between two looks at a state.
const BETWEEN: Duration = Duration::from_millis(20);
/// How much output of a command is compared.
const MOST_OUTPUT: usize = 1 << 16;
/// Ends the output of a command, before its status.
const END: &str = "\u{1}end ";

pub(super) struct Shell {
    folder: TempDir,
    environment: [(&'static str, String); 2],
    bash: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    background: BTreeMap<String, Child>,
}

/// A port that is free, below those that the system gives to clients.
pub(super) fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let first = process::id() % 8000;
    loop {
        let offset = u32::from(NEXT.fetch_add(1, Ordering::Relaxed));
        let port = u16::try_from(20_000 + (first + offset) % 12_000).expect("it is below 32,000");
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

pub(super) fn is_installed(program: &str) -> bool {
    let folders = std::env::var("PATH").unwrap_or_default();
    folders
        .split(':')
        .any(|folder| Path::new(folder).join(program).is_file())
}

/// Gives `tidegate run --to` other ports than the defaults, and refuses a file that would use them.
fn wrapper(listen: &str, admin: &str) -> String {
    let binary =
        std::env::var("TIDEGATE_DOCS_BINARY").unwrap_or(env!("CARGO_BIN_EXE_tidegate").to_owned());
    format!(
        r#"#!/usr/bin/env bash
case " $* " in
" top "* | " healthcheck "* | " explain --request-id "* | " explain "*" --request-id "*)
  export TIDEGATE_ADMIN=http://127.0.0.1:{admin} ;;
" run --to "* | " run "*" --to "*)
  case " $* " in *" --listen "*) ;; *) set -- "$@" --listen 127.0.0.1:{listen} ;; esac
  case " $* " in *" --admin "*) ;; *) set -- "$@" --admin 127.0.0.1:{admin} ;; esac ;;
" run "*)
  file=gateway.toml
  for argument; do case $argument in *.toml) file=$argument ;; esac; done
  grep -q '^\[admin\]' "$file" &&  grep -q '^\[\[listen\]\]' "$file" || {{ echo "$file uses default ports"; exit 70; }}
  ! grep -q ':8080"\|:9901"' "$file" || {{ echo "$file uses the ports of readers"; exit 70; }} ;;
esac
exec '{binary}' "$@"
"#
    )
}

impl Shell {
    /// Starts a shell in a new folder. `ports` are those of the page, each with the free one that replaces it.
    pub(super) fn start(ports: &Ports) -> Shell {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let programs = folder.path().join(".programs");
        fs::create_dir(&programs).expect("a folder for programs");
        let program = programs.join("tidegate");
        let admin = ports.instead_of("9901");
        let text = wrapper(&ports.instead_of("8080"), &admin);
        fs::write(&program, text).expect("the program is written");
        fs::set_permissions(&program, Permissions::from_mode(0o755)).expect("it can be executed");
        // on a terminal, curl shows its progress only if the output goes elsewhere
        fs::write(programs.join(".curlrc"), "silent\nshow-error\n").expect("it is written");
        let path = std::env::var("PATH").unwrap_or_default();
        let environment = [
            ("PATH", format!("{}:{path}", programs.display())),
            ("CURL_HOME", programs.display().to_string()),
        ];
        let mut bash = command(folder.path(), &environment)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("bash starts");
        let mut input = bash.stdin.take().expect("its input is piped");
        writeln!(input, "exec 2>&1").expect("bash reads");
        let output = BufReader::new(bash.stdout.take().expect("its output is piped"));
        Shell {
            folder,
            environment,
            bash,
            input,
            output,
            background: BTreeMap::new(),
        }
    }

    pub(super) fn write(&self, name: &str, text: &str) -> Result<(), String> {
        let path = self.folder.path().join(name);
        let parent = path.parent().ok_or("a file has a folder")?;
        fs::create_dir_all(parent)
            .and_then(|()| fs::write(&path, text))
            .map_err(|error| format!("{name}: {error}"))
    }

    /// `tidegate check` accepts the text without a warning, or ends with this status and reports this code.
    pub(super) fn check(
        &mut self,
        file: &str,
        text: &str,
        code: Option<(i32, &str)>,
    ) -> Result<(), String> {
        self.write(file, text)?;
        let (status, output) = self.execute(&format!("tidegate check {file}"))?;
        let accepted = match code {
            Some((expected, code)) => status == expected && output.contains(code),
            None => status == 0 && !output.contains("warning"),
        };
        if accepted {
            Ok(())
        } else {
            Err(format!(
                "tidegate check ended with {status}:\n{output}\nin:\n{text}"
            ))
        }
    }

    /// Runs a command that must end with this status and print what its page shows.
    pub(super) fn run(&mut self, command: &Command, expected: i32) -> Result<(), String> {
        let (status, output) = self.execute(&command.text)?;
        let expected = Some(expected).filter(|&expected| expected != status);
        let wrong = match expected {
            Some(expected) => format!("ended with {status}, not {expected}"),
            None if command.output.is(&output) => return Ok(()),
            None => format!("should print:\n{}\n", command.output),
        };
        Err(self.report(command, &wrong, &output))
    }

    /// Runs a command until it prints what its page shows.
    pub(super) fn repeat(&mut self, command: &Command) -> Result<(), String> {
        let start = Instant::now();
        loop {
            let (status, output) = self.execute(&command.text)?;
            if status == 0 && command.output.is(&output) {
                return Ok(());
            }
            if start.elapsed() > PATIENCE {
                let wrong = format!("never printed:\n{}\n", command.output);
                return Err(self.report(command, &wrong, &output));
            }
            pause();
        }
    }

    /// Starts a command that goes on, and waits until it has printed what its page shows.
    pub(super) fn start_background(&mut self, name: &str, command: &Command) -> Result<(), String> {
        let path = self.folder.path().join(format!(".{name}.out"));
        let file = File::create(&path).map_err(|error| error.to_string())?;
        let further = file.try_clone().map_err(|error| error.to_string())?;
        let child = self::command(self.folder.path(), &self.environment)
            .args(["-c", &format!("exec {}", command.text)])
            .stdin(Stdio::null())
            .stdout(file)
            .stderr(further)
            .spawn()
            .map_err(|error| error.to_string())?;
        let child = self.background.entry(name.to_owned()).or_insert(child);
        let start = Instant::now();
        loop {
            let output = fs::read_to_string(&path).unwrap_or_default();
            if command.output.is_in(&output) {
                return Ok(());
            }
            let ended = child.try_wait().map_err(|error| error.to_string())?;
            if ended.is_some() || start.elapsed() > PATIENCE {
                let wrong = format!("{ended:?} without:\n{}\n", command.output);
                return Err(self.report(command, &wrong, &output));
            }
            pause();
        }
    }

    /// Interrupts a background command, like Ctrl-C, and waits for its end.
    pub(super) fn stop(&mut self, command: &Command) -> Result<(), String> {
        let name = &command.text;
        let mut child = self
            .background
            .remove(name)
            .ok_or(format!("{name} does not run"))?;
        signal(child.id(), Signal::INT);
        let status = child.wait().map_err(|error| error.to_string())?;
        if status.success() {
            Ok(())
        } else {
            Err(format!("{name} ended with {status}"))
        }
    }

    /// Status and output of a command.
    fn execute(&mut self, command: &str) -> Result<(i32, String), String> {
        let lost = |error: io::Error| format!("the shell is lost: {error}");
        writeln!(
            self.input,
            "{{ {command}\n}} </dev/null\nprintf '\\n{END}%s\\n' $?"
        )
        .map_err(lost)?;
        let (ended, still_running) = mpsc::sync_channel::<()>(1);
        let group = self.bash.id();
        // a command that does not end is killed with the shell, which ends its output
        let watchdog = thread::spawn(move || {
            let waited = still_running.recv_timeout(PATIENCE);
            if waited == Err(mpsc::RecvTimeoutError::Timeout) {
                signal(group, Signal::KILL);
            }
        });
        let outcome = self.read_output();
        drop(ended);
        watchdog.join().map_err(|_| "the watchdog failed")?;
        outcome
    }

    /// The output up to [`END`], and the status behind it.
    fn read_output(&mut self) -> Result<(i32, String), String> {
        let mut output = String::new();
        loop {
            let mut line = String::new();
            let read = self.output.read_line(&mut line);
            if read.map_err(|error| format!("the shell is lost: {error}"))? == 0 {
                return Err(format!(
                    "the command did not end, or ended the shell:\n{output}"
                ));
            }
            if let Some(status) = line.strip_prefix(END) {
                // the line end before the mark is not part of the output
                output.pop();
                return Ok((status.trim().parse().unwrap_or(-1), output));
            }
            output += &line;
            // of a command that repeats itself the end is enough
            if output.len() > MOST_OUTPUT {
                output = output.chars().skip(MOST_OUTPUT / 2).collect();
            }
        }
    }

    fn report(&self, command: &Command, wrong: &str, output: &str) -> String {
        let mut report = format!(
            "line {}:\n$ {}\n{wrong}\nIt printed:\n{output}",
            command.line, command.text
        );
        for name in self.background.keys() {
            let path = self.folder.path().join(format!(".{name}.out"));
            let output = fs::read_to_string(path).unwrap_or_default();
            report += &format!("\n{name} printed:\n{output}");
        }
        report
    }
}

impl Drop for Shell {
    fn drop(&mut self) {
        for child in self.background.values_mut().chain([&mut self.bash]) {
            signal(child.id(), Signal::KILL);
            let _ = child.wait();
        }
    }
}

/// A short time, after which the state that is waited for is looked at again.
#[expect(clippy::disallowed_methods, reason = "a test thread may block")]
fn pause() {
    thread::sleep(BETWEEN);
}

/// A shell of its own process group, without the developer's settings.
fn command(folder: &Path, environment: &[(&str, String)]) -> process::Command {
    let mut command = process::Command::new("bash");
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("TIDEGATE_") {
            command.env_remove(name);
        }
    }
    command.envs(environment.iter().map(|(name, value)| (name, value)));
    command.current_dir(folder).process_group(0);
    command
}

/// Signals a command and all that it started.
fn signal(group: u32, signal: Signal) {
    let group = i32::try_from(group).ok().and_then(Pid::from_raw);
    if let Some(group) = group {
        let _ = kill_process_group(group, signal);
    }
}
