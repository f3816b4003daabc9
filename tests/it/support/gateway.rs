//! Runs the real binary as a child process, with its own configuration and ports chosen by the
//! system.

use std::{
    fs,
    io::{BufRead, BufReader, Read},
    net::SocketAddr,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::{Arc, Mutex},
    thread,
    time::{Duration, Instant},
};

use tempfile::TempDir;

use super::{
    cli::{Finished, tidegate_command},
    http::{Broken, Client, Request, Response},
    metrics::Metrics,
    origin::Origin,
    signal::signal,
    wait::{PATIENCE, eventually, lock, time_passes},
};

/// A running gateway; stopped on drop.
pub struct Gateway {
    child: Child,
    folder: TempDir,
    /// The URL of the upstream `origin`.
    origin: String,
    ready: Ready,
    stdout: Output,
    stderr: Output,
}

/// The content of the file that `tidegate run --ready-file` writes.
struct Ready {
    pid: u64,
    listeners: Vec<SocketAddr>,
    admin: SocketAddr,
}

impl Ready {
    fn parse(text: &str) -> Option<Ready> {
        let json: serde_json::Value = serde_json::from_str(text).ok()?;
        let address = |value: &serde_json::Value| value.as_str()?.parse().ok();
        // tests choose the path of a Unix socket themselves
        let is_tcp = |value: &&serde_json::Value| !value.to_string().starts_with("\"unix:");
        let listeners = json["listeners"].as_array()?.iter().filter(is_tcp);
        let listeners: Option<Vec<SocketAddr>> = listeners.map(address).collect();
        Some(Ready {
            pid: json["pid"].as_u64()?,
            listeners: listeners?,
            admin: address(&json["admin"])?,
        })
    }
}

/// The text that a child has written so far.
type Output = Arc<Mutex<String>>;

/// A gateway to be started.
pub struct Builder {
    toml: String,
    origin: Option<String>,
    files: Vec<(String, String)>,
    environment: Vec<(String, String)>,
    descriptors: Option<(u32, u32)>,
}

impl Gateway {
    /// Starts from the part of the configuration under test. Adds whatever is missing: two workers,
    /// a listener and an admin page on ports that the system chooses, the upstream `origin`, and a
    /// route `all` to it. Replaces `{origin}` by the address of the test's origin.
    pub fn with(toml: &str) -> Builder {
        Builder {
            toml: toml.to_owned(),
            origin: None,
            files: Vec::new(),
            environment: Vec::new(),
            descriptors: None,
        }
    }

    /// Starts `tidegate run` with these arguments, without a configuration file.
    pub fn run(arguments: &[&str]) -> Gateway {
        Gateway::start_in(new_folder(), arguments, &[], None, String::new())
            .unwrap_or_else(|finished| panic!("the gateway did not start: {finished}"))
    }

    fn start_in(
        folder: TempDir,
        arguments: &[&str],
        environment: &[(String, String)],
        descriptors: Option<(u32, u32)>,
        origin: String,
    ) -> Result<Gateway, Finished> {
        let ready_file = folder.path().join("ready.json");
        let mut command = match descriptors {
            Some((soft, hard)) => with_descriptors(&tidegate_command(folder.path()), soft, hard),
            None => tidegate_command(folder.path()),
        };
        command
            .arg("run")
            .args(arguments)
            .envs(environment.iter().cloned())
            .arg("--ready-file")
            .arg(&ready_file);
        let mut child = command
            .spawn()
            .unwrap_or_else(|error| panic!("start {command:?}: {error}"));
        let stdout = collect(child.stdout.take().expect("stdout is piped"));
        let stderr = collect(child.stderr.take().expect("stderr is piped"));
        match wait_until_ready(&mut child, &ready_file) {
            Ok(ready) => {
                assert_eq!(
                    ready.pid,
                    u64::from(child.id()),
                    "the pid of the ready file"
                );
                Ok(Gateway {
                    child,
                    folder,
                    origin,
                    ready,
                    stdout,
                    stderr,
                })
            }
            Err(status) => {
                wait_until_read(&stdout);
                wait_until_read(&stderr);
                Err(Finished::new(
                    status,
                    lock(&stdout).clone(),
                    lock(&stderr).clone(),
                ))
            }
        }
    }

    /// The address of the first listener.
    pub fn address(&self) -> SocketAddr {
        self.ready.listeners[0]
    }

    /// The addresses of all listeners, in configuration order.
    pub fn listeners(&self) -> &[SocketAddr] {
        &self.ready.listeners
    }

    pub fn admin_address(&self) -> SocketAddr {
        self.ready.admin
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The folder of its configuration.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// The complete banner. Waits until all of it has been written to stderr.
    pub fn banner(&self) -> String {
        eventually("the banner", || {
            let text = self.stderr();
            if text.contains("end with Ctrl-C") {
                Ok(text)
            } else {
                Err(text)
            }
        })
    }

    /// All of stderr: the banner, then the log.
    pub fn stderr(&self) -> String {
        lock(&self.stderr).clone()
    }

    /// All output, stdout before stderr.
    pub fn output(&self) -> String {
        lock(&self.stdout).clone() + &self.stderr()
    }

    /// Connects to the first listener.
    pub fn connect(&self) -> Client {
        Client::connect(self.address())
    }

    /// Sends one request on a new connection.
    pub fn send(&self, request: &Request) -> Response {
        self.connect().send(request)
    }

    pub fn get(&self, target: &str) -> Response {
        self.send(&Request::get(target))
    }

    /// Sends `count` equal requests on one connection and returns their statuses.
    pub fn statuses(&self, request: &Request, count: usize) -> Vec<u16> {
        let mut client = self.connect();
        (0..count).map(|_| client.send(request).status).collect()
    }

    /// Sends a GET to the admin listener, which may be gone.
    pub fn try_admin(&self, path: &str) -> Result<Response, Broken> {
        let stream = std::net::TcpStream::connect(self.ready.admin)?;
        Client::over(stream).try_send(&self.admin_request("GET", path))
    }

    /// A request with the `Host` that the admin listener accepts.
    pub fn admin_request(&self, method: &str, path: &str) -> Request {
        Request::new(method, path)
            .header("host", &self.ready.admin.to_string())
            .header("connection", "close")
    }

    pub fn admin(&self, path: &str) -> Response {
        self.try_admin(path)
            .unwrap_or_else(|broken| panic!("GET {path} from the admin listener: {broken:?}"))
    }

    /// Replaces the configuration file. Adds missing parts like [`Gateway::with`].
    pub fn rewrite(&self, toml: &str) {
        let config = self.folder.path().join("gateway.toml");
        let unfinished = config.with_extension("tmp");
        fs::write(&unfinished, whole(toml, &self.origin)).expect("a temporary folder is writable");
        fs::rename(unfinished, config).expect("a temporary folder is writable");
    }

    /// Calls the admin API; `null` means no body.
    pub fn ask(&self, method: &str, path: &str, body: &serde_json::Value) -> Response {
        let mut request = self.admin_request(method, path);
        if !body.is_null() {
            request = request.header("content-type", "application/json");
            request.body = body.to_string().into_bytes();
        }
        Client::connect(self.ready.admin).send(&request)
    }

    /// Reads a page of the admin API.
    pub fn look(&self, path: &str) -> serde_json::Value {
        self.change("GET", path, &serde_json::Value::Null)
    }

    /// Calls the admin API, which must succeed, and returns the response.
    pub fn change(&self, method: &str, path: &str, body: &serde_json::Value) -> serde_json::Value {
        let response = self.ask(method, path, body);
        let text = response.text();
        assert_eq!(response.status, 200, "{method} {path} {body}: {text}");
        response.json()
    }

    /// Requests a reload and returns the response.
    pub fn reload(&self) -> Response {
        let request = self.admin_request("POST", "/api/v1/reload");
        let request = request.header("content-type", "application/json");
        Client::connect(self.ready.admin).send(&request)
    }

    /// Reloads with another configuration and returns the report of changes.
    pub fn reconfigure(&self, toml: &str) -> serde_json::Value {
        self.rewrite(toml);
        let response = self.reload();
        assert_eq!(response.status, 200, "{}", response.text());
        response.json()
    }

    /// The current `/metrics`.
    pub fn metrics(&self) -> Metrics {
        let response = self.admin("/metrics");
        assert_eq!(response.status, 200, "/metrics: {}", response.text());
        Metrics::parse(&response.text())
    }

    /// The sum of the series that match a selector such as `tidegate_decisions_total{limit="ip"}`.
    pub fn metric(&self, selector: &str) -> f64 {
        self.metrics().sum(selector)
    }

    /// Waits until a metric has this value. The last request may be counted after its response.
    pub fn wait_for_metric(&self, selector: &str, expected: f64) {
        eventually(selector, || {
            let value = self.metric(selector);
            // counts are integers
            if (value - expected).abs() < 0.5 {
                Ok(())
            } else {
                Err(format!("{value}, not {expected}"))
            }
        });
    }

    /// The peak resident memory of the process, in bytes.
    #[cfg(target_os = "linux")]
    pub fn peak_memory_bytes(&self) -> u64 {
        let path = format!("/proc/{}/status", self.pid());
        let status = fs::read_to_string(&path).expect("a running child has a status");
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix("VmHWM:"))
            .expect("Linux reports VmHWM");
        let kibibytes: u64 = line
            .trim()
            .trim_end_matches(" kB")
            .parse()
            .expect("VmHWM is in kB");
        kibibytes * 1024
    }

    /// Sends a signal by name, such as `TERM`.
    pub fn signal(&self, name: &str) {
        signal(self.pid(), name);
    }

    /// Whether the process still runs.
    pub fn is_running(&mut self) -> bool {
        self.child
            .try_wait()
            .expect("a child can be asked")
            .is_none()
    }

    /// Waits until the process ends on its own.
    pub fn wait(&mut self) -> ExitStatus {
        let status = eventually("the gateway to end", || match self.child.try_wait() {
            Ok(Some(status)) => Ok(status),
            Ok(None) => Err("still running".into()),
            Err(error) => Err(error.to_string()),
        });
        wait_until_read(&self.stdout);
        wait_until_read(&self.stderr);
        status
    }
}

/// Wraps the command in a shell that lowers the descriptor limits and then executes it.
fn with_descriptors(command: &Command, soft: u32, hard: u32) -> Command {
    let mut limited = Command::new("sh");
    limited
        .arg("-c")
        .arg(format!(
            "ulimit -Sn {soft} && ulimit -Hn {hard} && exec \"$0\" \"$@\""
        ))
        .arg(command.get_program())
        .args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => limited.env(name, value),
            None => limited.env_remove(name),
        };
    }
    if let Some(folder) = command.get_current_dir() {
        limited.current_dir(folder);
    }
    piped(&mut limited);
    limited
}

impl Drop for Gateway {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if thread::panicking() {
            eprintln!("── the gateway's stderr ──\n{}", self.stderr());
        }
    }
}

impl Builder {
    /// Sets the origin of the upstream `origin` and of `{origin}`.
    pub fn upstream(self, origin: &Origin) -> Builder {
        self.upstream_at(&origin.url())
    }

    /// Like [`Builder::upstream`], for an origin that the test does not own or that is absent.
    pub fn upstream_at(mut self, server: &str) -> Builder {
        self.origin = Some(server.to_owned());
        self
    }

    /// Adds a file beside the configuration.
    pub fn file(mut self, name: &str, text: &str) -> Builder {
        self.files.push((name.to_owned(), text.to_owned()));
        self
    }

    /// Sets an environment variable.
    pub fn env(mut self, name: &str, value: &str) -> Builder {
        self.environment.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Sets the soft and hard limit of file descriptors.
    pub fn descriptors(mut self, soft: u32, hard: u32) -> Builder {
        self.descriptors = Some((soft, hard));
        self
    }

    /// Starts the gateway and waits until it is ready. If it does not start, the test fails with
    /// its stderr.
    pub fn start(self) -> Gateway {
        self.try_start()
            .unwrap_or_else(|finished| panic!("the gateway did not start: {finished}"))
    }

    /// Expects that the gateway refuses to start, and returns how it ended.
    pub fn refuse(self) -> Finished {
        match self.try_start() {
            Ok(gateway) => panic!("the gateway started; stderr: {}", gateway.stderr()),
            Err(finished) => finished,
        }
    }

    fn try_start(self) -> Result<Gateway, Finished> {
        let (environment, descriptors) = (self.environment.clone(), self.descriptors);
        let origin = self.server();
        let (folder, config) = self.write();
        let arguments = ["--config", &*config.to_string_lossy()];
        Gateway::start_in(folder, &arguments, &environment, descriptors, origin)
    }

    /// Writes the configuration files into a new folder.
    pub fn write(self) -> (TempDir, PathBuf) {
        let folder = new_folder();
        for (name, text) in &self.files {
            fs::write(folder.path().join(name), text).expect("a temporary folder is writable");
        }
        let config = folder.path().join("gateway.toml");
        let whole = whole(&self.toml, &self.server());
        fs::write(&config, whole).expect("a temporary folder is writable");
        (folder, config)
    }

    fn server(&self) -> String {
        let origin = self.origin.clone();
        origin.unwrap_or_else(|| "builtin:echo".to_owned())
    }
}

/// The configuration, completed with the parts that the test left out.
fn whole(toml: &str, origin: &str) -> String {
    let mut toml = toml.replace("{origin}", origin);
    let parts = [
        ("[server]", "[server]\nworkers = 2\n".to_owned()),
        (
            "[[listen]]",
            "[[listen]]\naddress = \"127.0.0.1:0\"\n".to_owned(),
        ),
        ("[admin]", "[admin]\naddress = \"127.0.0.1:0\"\n".to_owned()),
        (
            "[upstream.",
            format!("[upstream.origin]\nservers = [{origin:?}]\n"),
        ),
        (
            "[[route]]",
            "[[route]]\nname = \"all\"\npath = \"/{*rest}\"\nupstream = \"origin\"\n".to_owned(),
        ),
    ];
    for (table, text) in parts {
        if !toml.contains(table) {
            toml = format!("{toml}\n{text}");
        }
    }
    toml
}

fn new_folder() -> TempDir {
    tempfile::Builder::new()
        .prefix("tidegate-it-")
        .tempdir()
        .expect("a temporary folder")
}

/// The content of the ready file, or how the process ended before it wrote one.
fn wait_until_ready(child: &mut Child, file: &Path) -> Result<Ready, ExitStatus> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Ok(text) = fs::read_to_string(file) {
            // the file is renamed into place, so it is complete
            return Ok(
                Ready::parse(&text).unwrap_or_else(|| panic!("the ready file holds {text:?}"))
            );
        }
        if let Some(status) = child.try_wait().expect("a child can be asked") {
            return Err(status);
        }
        if Instant::now() > deadline {
            let _ = child.kill();
            panic!("the gateway neither became ready nor ended within {PATIENCE:?}");
        }
        time_passes(Duration::from_millis(5), "the next poll is due");
    }
}

/// Reads a pipe to its end on its own thread, so that the child never blocks on it.
fn collect(pipe: impl Read + Send + 'static) -> Output {
    let output = Output::default();
    let sink = Arc::clone(&output);
    thread::spawn(move || {
        let mut pipe = BufReader::new(pipe);
        let mut line = Vec::new();
        while pipe
            .read_until(b'\n', &mut line)
            .is_ok_and(|length| length > 0)
        {
            lock(&sink).push_str(&String::from_utf8_lossy(&line));
            line.clear();
        }
    });
    output
}

/// Waits until the last output of an ended child has arrived. Its reader then drops the text.
fn wait_until_read(output: &Output) {
    eventually("the end of its output", || {
        match Arc::strong_count(output) {
            1 => Ok(()),
            _ => Err("its pipe is open".to_owned()),
        }
    });
}

/// Pipes stdout and stderr of a child to the test.
pub fn piped(command: &mut Command) -> &mut Command {
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
}
