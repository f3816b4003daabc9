//! `[redis]`: where gateways keep the limits that they share.

use std::time::Duration;

use crate::{
    budget::{Server, Settings},
    config::{
        Share,
        code::Code,
        diagnostic::{Problem, quote},
        file::Section,
        keys,
        value::Value,
    },
};

const DEFAULT_URL: &str = "redis://127.0.0.1:6379";

/// The settings, where there is such a table and it is right.
#[expect(
    clippy::option_option,
    reason = "that there is a table matters even where it is wrong"
)]
pub(super) fn compile(file: &Section<'_>) -> Option<Option<Settings>> {
    let table = file.get("redis")?;
    let section = table.section(keys::REDIS.title.to_owned(), &keys::REDIS)?;
    let server = match section.get("url").map(|value| value.text()) {
        Some(text) => text.and_then(|text| text.parse("the URL of a Redis", parse_url)),
        None => parse_url(DEFAULT_URL).ok(),
    };
    let key_prefix = match section.get("key_prefix").map(|value| value.text()) {
        Some(text) => text.and_then(|text| text.parse("a prefix of keys", parse_prefix)),
        None => Some("tidegate".to_owned()),
    };
    let budget = section.duration(
        "budget",
        Duration::from_millis(5),
        Duration::from_millis(1)..=Duration::from_secs(1),
    );
    let connect_timeout = section.duration(
        "connect_timeout",
        Duration::from_millis(50),
        Duration::from_millis(1)..=Duration::from_secs(10),
    );
    let region_share = section.get("region_share").map(|value| part(&value));
    section.finish();
    Some(settings(
        server,
        key_prefix,
        budget,
        connect_timeout,
        region_share.unwrap_or(Some(1.0)),
    ))
}

fn settings(
    server: Option<Server>,
    key_prefix: Option<String>,
    budget: Duration,
    connect_timeout: Duration,
    region_share: Option<f64>,
) -> Option<Settings> {
    Some(Settings {
        server: server?,
        key_prefix: key_prefix?,
        budget,
        connect_timeout,
        region_share: region_share?,
    })
}

/// More than nothing of a whole.
pub(super) fn part(value: &Value<'_>) -> Option<f64> {
    let share = value.share()?;
    if Share::from_ppm(0) == Some(share) {
        let message = format!("{} is out of range: 0", value.what);
        let problem = Problem::new(Code::OutOfRange, message);
        value.error(problem.label("expected more than 0, at most 1"));
        return None;
    }
    Some(f64::from(share.ppm()) / 1e6)
}

fn parse_url(text: &str) -> Result<Server, Problem> {
    Server::parse(text).map_err(|_| {
        let problem = Problem::new(Code::BadAddress, "this is not the URL of a Redis");
        problem.hint(
            "write \"redis://HOST:PORT\", \"rediss://USER:PASSWORD@HOST:PORT/DATABASE\" for TLS, or \"unix:///path/redis.sock\"",
        )
    })
}

fn parse_prefix(text: &str) -> Result<String, Problem> {
    const MAX_BYTES: usize = 64;
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-' | ':' | '/');
    if (1..=MAX_BYTES).contains(&text.len()) && text.chars().all(allowed) {
        return Ok(text.to_owned());
    }
    let message = format!("{} cannot begin the keys in Redis", quote(text));
    let hint = format!("use 1 to {MAX_BYTES} characters of A-Z a-z 0-9 _ . - : /");
    Err(Problem::new(Code::BadName, message).hint(hint))
}
