//! `tidegate healthcheck`: asks a running gateway whether it is ready, for containers without curl.

use std::{
    io::{self, Read, Write},
    process::ExitCode,
    time::Duration,
};

use super::timed_stream::TimedStream;

/// Arguments of `tidegate healthcheck`.
#[derive(Debug, clap::Args)]
pub struct HealthcheckArgs {
    /// The admin address of the gateway: http://HOST:PORT
    #[arg(
        long,
        value_name = "URL",
        env = "TIDEGATE_ADMIN",
        default_value = "http://127.0.0.1:9901"
    )]
    admin: String,
}

/// The longest time for the whole check.
const PATIENCE: Duration = Duration::from_secs(2);

/// Exits 0 if `/readyz` answers 200, otherwise 1 with the reason on stderr. Container health checks
/// reserve 2.
pub fn healthcheck(args: &HealthcheckArgs) -> ExitCode {
    let authority = match authority(&args.admin) {
        Ok(authority) => authority,
        Err(wrong) => {
            eprintln!("error: --admin {}: {wrong}", args.admin);
            return ExitCode::FAILURE;
        }
    };
    match ask(authority) {
        Ok(200) => ExitCode::SUCCESS,
        Ok(status) => {
            eprintln!("not ready: http://{authority}/readyz answers {status}");
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!(
                "not ready: http://{authority}: {error}\nCheck that tidegate is running, or name its [admin] address with --admin http://HOST:PORT"
            );
            ExitCode::FAILURE
        }
    }
}

/// The `HOST:PORT` of an admin address, with or without its scheme.
pub(super) fn authority(admin: &str) -> Result<&str, String> {
    const HINT: &str = "write http://HOST:PORT, for example http://127.0.0.1:9901";
    if admin.starts_with("https://") {
        return Err(format!(
            "the admin listener speaks HTTP without TLS: {HINT}"
        ));
    }
    let authority = admin.strip_prefix("http://").unwrap_or(admin);
    let authority = authority.strip_suffix('/').unwrap_or(authority);
    if authority.contains("://") {
        return Err(format!("this is not an admin address: {HINT}"));
    }
    if authority.contains(['/', '?', '#']) {
        return Err(format!("it has a path: {HINT}"));
    }
    let port = authority
        .rsplit_once(':')
        .filter(|(host, _)| !host.is_empty())
        .and_then(|(_, port)| port.parse::<u16>().ok());
    port.map(|_| authority)
        .ok_or_else(|| format!("it has no host or no port: {HINT}"))
}

/// The status of `GET /readyz`.
fn ask(authority: &str) -> io::Result<u16> {
    let mut stream = TimedStream::connect(authority, PATIENCE)?;
    let request = format!("GET /readyz HTTP/1.1\r\nhost: {authority}\r\nconnection: close\r\n\r\n");
    stream.write_all(request.as_bytes())?;
    let mut head = [0; 12];
    stream.read_exact(&mut head)?;
    let status = head
        .strip_prefix(b"HTTP/1.1 ")
        .and_then(|digits| std::str::from_utf8(digits).ok()?.parse().ok());
    status.ok_or_else(|| io::Error::other("the response is not HTTP"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_admin_address_is_a_host_and_a_port() {
        for good in [
            "http://127.0.0.1:9901",
            "http://[::1]:9901/",
            "gateway:9901",
        ] {
            assert!(authority(good).is_ok(), "{good}");
        }
        for (bad, part) in [
            ("https://127.0.0.1:9901", "without TLS"),
            ("http://127.0.0.1:9901/readyz", "path"),
            ("http://127.0.0.1", "port"),
            ("http://:9901", "host"),
            ("unix:///run/a", "not an admin address"),
            ("", "port"),
        ] {
            let wrong = authority(bad).expect_err(bad);
            assert!(
                wrong.contains(part) && wrong.contains("http://HOST:PORT"),
                "{bad}: {wrong}"
            );
        }
    }
}
