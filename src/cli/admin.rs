//! The client of the admin API: one short connection per request, with JSON bodies.

use std::{
    io::{Read, Write},
    path::PathBuf,
    time::Duration,
};

use anyhow::{Context as _, bail};
use serde_json::Value;

use super::{healthcheck::authority, terminal::printable_line, timed_stream::TimedStream};
use crate::config;

/// The options that select a running gateway.
#[derive(Clone, Debug, clap::Args)]
pub struct AdminAddress {
    /// The admin address of a running gateway: http://HOST:PORT
    #[arg(long, value_name = "URL", env = "TIDEGATE_ADMIN")]
    pub admin: Option<String>,
    /// The file with the admin token
    #[arg(long, value_name = "FILE", env = "TIDEGATE_ADMIN_TOKEN_FILE")]
    pub token_file: Option<PathBuf>,
}

/// The admin address without `--admin`.
const DEFAULT: &str = "http://127.0.0.1:9901";
/// The longest time for a whole exchange.
const PATIENCE: Duration = Duration::from_secs(10);
/// The largest response that is read.
const ANSWER_MAX_BYTES: u64 = 16 << 20;

impl AdminAddress {
    /// The URL from the command line, else the default.
    pub fn url(&self) -> &str {
        self.admin.as_deref().unwrap_or(DEFAULT)
    }

    /// Calls an operation and returns its JSON. The error says what failed and what to try
    /// next.
    pub fn ask(&self, method: &str, path: &str, body: &Value) -> anyhow::Result<Value> {
        let url = self.url();
        let authority =
            authority(url).map_err(|wrong| anyhow::anyhow!("--admin {url}: {wrong}"))?;
        let (status, text) = self.exchange(authority, method, path, body).with_context(|| {
            format!(
                "no gateway answers at http://{authority}: check that tidegate is running, or name its [admin] address with --admin http://HOST:PORT"
            )
        })?;
        let json: Value = serde_json::from_str(&text).unwrap_or_default();
        match status {
            200 => Ok(json),
            401 => {
                bail!("http://{authority} requires a token: name its file with --token-file FILE")
            }
            _ => {
                let why = json["error"].as_str().or(json["detail"].as_str());
                bail!("{}", printable_line(why.unwrap_or(text.trim())))
            }
        }
    }

    fn exchange(
        &self,
        authority: &str,
        method: &str,
        path: &str,
        body: &Value,
    ) -> anyhow::Result<(u16, String)> {
        let token = match &self.token_file {
            Some(file) => {
                let token = config::read_file(file)
                    .and_then(|bytes| {
                        String::from_utf8(bytes).map_err(|_| "it is not UTF-8".to_owned())
                    })
                    .map_err(|why| anyhow::anyhow!("cannot read {}: {why}", file.display()))?;
                format!("authorization: Bearer {}\r\n", token.trim())
            }
            None => String::new(),
        };
        let body = match body {
            Value::Null => String::new(),
            body => body.to_string(),
        };
        let mut stream = TimedStream::connect(authority, PATIENCE)?;
        let request = format!(
            "{method} /api/v1/{path} HTTP/1.1\r\nhost: {authority}\r\n{token}content-type: application/json\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}",
            body.len()
        );
        stream.write_all(request.as_bytes())?;
        let mut answer = String::new();
        stream.take(ANSWER_MAX_BYTES).read_to_string(&mut answer)?;
        let (head, body) = answer
            .split_once("\r\n\r\n")
            .context("the response is not HTTP")?;
        let status = head
            .strip_prefix("HTTP/1.1 ")
            .and_then(|rest| rest.get(..3)?.parse().ok());
        Ok((status.context("the response is not HTTP")?, body.to_owned()))
    }
}
