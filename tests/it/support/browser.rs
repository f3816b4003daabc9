//! A headless browser, driven through the WebDriver protocol, to test what a page really shows.

use std::{
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::SocketAddr,
    process::{Child, Command, Stdio},
    time::Duration,
};

use serde_json::{Value, json};

use super::{
    http::{Client, Request},
    wait::within,
};

/// A browser starts slowly on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

pub struct Browser {
    driver: Child,
    address: SocketAddr,
    session: String,
}

impl Browser {
    /// Starts a browser, which ends on drop. Fails the test if none is installed; scripts/test
    /// installs it.
    pub fn start() -> Browser {
        let mut driver = Command::new("chromedriver")
            .arg("--port=0")
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap_or_else(|error| panic!("chromedriver: {error}; scripts/test installs it"));
        let stdout = driver.stdout.take().expect("stdout is piped");
        let port = BufReader::new(stdout)
            .lines()
            .map_while(Result::ok)
            .find_map(|line| {
                let (_, port) = line.split_once("started successfully on port ")?;
                port.trim_end_matches('.').parse().ok()
            });
        let port = port.expect("chromedriver prints its port");
        let mut browser = Browser {
            driver,
            address: SocketAddr::from(([127, 0, 0, 1], port)),
            session: String::new(),
        };
        let arguments = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--disable-background-networking",
            "--disable-component-update",
        ];
        let options = json!({ "args": arguments });
        let wanted =
            json!({ "capabilities": { "alwaysMatch": { "goog:chromeOptions": options } } });
        let started = browser.ask("POST", "/session", &wanted);
        browser.session = started["sessionId"].as_str().expect("a session").to_owned();
        browser
    }

    fn ask(&self, method: &str, path: &str, body: &Value) -> Value {
        let mut request = Request::new(method, path)
            .header("host", &self.address.to_string())
            .header("content-type", "application/json")
            .header("connection", "close");
        if method == "POST" {
            request.body = body.to_string().into_bytes();
        }
        let stream = std::net::TcpStream::connect(self.address).expect("the driver listens");
        stream
            .set_read_timeout(Some(PATIENCE))
            .expect("a socket has timeouts");
        let answer = Client::on(stream).send(&request);
        assert_eq!(answer.status, 200, "{method} {path}: {}", answer.text());
        answer.json()["value"].clone()
    }

    fn in_session(&self, method: &str, what: &str, body: &Value) -> Value {
        self.ask(method, &format!("/session/{}/{what}", self.session), body)
    }

    pub fn open(&self, url: &str) {
        self.in_session("POST", "url", &json!({ "url": url }));
    }

    /// Runs a script in the page and returns its result.
    pub fn run(&self, script: &str) -> Value {
        self.in_session(
            "POST",
            "execute/sync",
            &json!({ "script": script, "args": [] }),
        )
    }

    /// Waits until a script returns true.
    pub fn wait_for(&self, what: &str, script: &str) {
        within(PATIENCE, what, || {
            match self.run(&format!("return {script}")) {
                Value::Bool(true) => Ok(()),
                other => Err(format!(
                    "{other}; the page shows {}",
                    self.run("return document.body.innerText")
                )),
            }
        });
    }

    /// Resizes the page's window.
    pub fn resize(&self, width: u32, height: u32) {
        let size =
            json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": false });
        self.devtools("Emulation.setDeviceMetricsOverride", &size);
    }

    pub fn prefer(&self, scheme: &str) {
        let features = json!({ "features": [{ "name": "prefers-color-scheme", "value": scheme }] });
        self.devtools("Emulation.setEmulatedMedia", &features);
    }

    fn devtools(&self, command: &str, params: &Value) {
        let command = json!({ "cmd": command, "params": params });
        self.in_session("POST", "goog/cdp/execute", &command);
    }

    /// The page as a PNG in base64.
    pub fn screenshot(&self) -> String {
        let png = self.in_session("GET", "screenshot", &Value::Null);
        png.as_str().expect("base64").to_owned()
    }

    /// Messages in the browser's console, without those about responses of the gateway that are not
    /// 200.
    pub fn complaints(&self) -> Vec<String> {
        let log = self.in_session("POST", "se/log", &json!({ "type": "browser" }));
        let lines = log.as_array().cloned().unwrap_or_default();
        let said = lines.iter().filter(|line| line["source"] != "network");
        said.map(|line| line["message"].to_string()).collect()
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // runs also after a failed test, so it must not panic; otherwise the browser would outlive
        // its driver
        if let Ok(mut driver) = std::net::TcpStream::connect(self.address) {
            let (session, address) = (&self.session, self.address);
            let _ = driver.set_read_timeout(Some(PATIENCE));
            let _ = write!(
                driver,
                "DELETE /session/{session} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n"
            );
            let _ = driver.read(&mut [0; 1024]);
        }
        let _ = self.driver.kill();
        let _ = self.driver.wait();
    }
}
