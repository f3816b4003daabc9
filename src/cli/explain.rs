//! `tidegate explain`: what becomes of a described request, step by step, without a gateway that runs.

use std::{io::Write as _, net::IpAddr, path::PathBuf, process::ExitCode};

use anyhow::{Context as _, bail};
use clap::Args;
use http::{
    HeaderName, HeaderValue, Method, Request, Uri,
    header::{CONTENT_LENGTH, CONTENT_TYPE, HOST},
};

use super::{ConfigFile, check::Format};
use crate::{
    config,
    gateway::explain::{Described, Text, explain as explain_request},
};

/// What `tidegate explain` is told.
#[derive(Clone, Debug, Args)]
#[command(
    after_help = "Examples:\n  tidegate explain http://api.example.com/v1/export\n  tidegate explain POST /login --peer 10.0.0.1 -H 'x-forwarded-for: 203.0.113.9' -d 'username=alice'\n\nThe request is decided as the first of a gateway that has just started: what a running one has counted is not known here."
)]
pub struct ExplainArgs {
    /// The request: its URL, or its path and query; before it the method, if it is not GET (POST with --data)
    #[arg(value_name = "[METHOD] URL", num_args = 1..=2, required = true)]
    request: Vec<String>,
    /// The configuration file [env: TIDEGATE_CONFIG] [default: gateway.toml]
    #[arg(short, long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// A field of the request, such as 'x-api-key: secret'; may be repeated. Its value is never printed
    #[arg(short = 'H', long = "header", value_name = "NAME: VALUE")]
    headers: Vec<String>,
    /// Who is connected: the client, or the last proxy before the gateway
    #[arg(long, value_name = "IP", default_value = "127.0.0.1")]
    peer: IpAddr,
    /// The request's body, for limits that are keyed by a field of it; a form, unless a content-type says otherwise
    #[arg(short, long, value_name = "BODY")]
    data: Option<String>,
    /// How the explanation is printed
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

/// Explains: 0 whatever the answer to the request would be, 1 where the configuration or the request cannot be read.
pub fn explain(args: &ExplainArgs) -> ExitCode {
    match try_explain(args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(anstream::stderr(), "error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn try_explain(args: &ExplainArgs) -> anyhow::Result<()> {
    let described = described(args)?;
    let file = ConfigFile {
        file: None,
        config: args.config.clone(),
    };
    let loaded = config::load(&file.path()).map_err(|report| {
        let _ = anstream::stderr().write_all(report.text(true).as_bytes());
        anyhow::anyhow!("{}", report.summary())
    })?;
    let explanation = explain_request(loaded.snapshot, &described)?;
    let text = match args.format {
        Format::Text => Text(&explanation).to_string(),
        Format::Json => format!("{}\n", explanation.json()),
    };
    // a reader that went away is no failure
    let _ = std::io::stdout().write_all(text.as_bytes());
    Ok(())
}

/// The request as a client would send it, byte for byte: nothing of the path is tidied up.
fn described(args: &ExplainArgs) -> anyhow::Result<Described> {
    let (method, url) = match args.request.as_slice() {
        [method, url] => (method.as_str(), url),
        [url] if args.data.is_some() => ("POST", url),
        [url] => ("GET", url),
        _ => bail!("give one URL, and before it perhaps a method"),
    };
    let method = Method::from_bytes(method.as_bytes())
        .with_context(|| format!("{} is not a method", quoted(method)))?;
    let uri: Uri = url.parse().with_context(|| {
        format!(
            "{} is not a URL: write http://HOST/PATH or /PATH (a gateway would answer 400)",
            quoted(url)
        )
    })?;
    let authority = uri.authority().map(|authority| authority.to_string());
    let target = match uri.path_and_query() {
        Some(target) if authority.is_none() || uri.scheme().is_some() => target.as_str(),
        _ => bail!(
            "{} has no scheme: write http://HOST/PATH, or /PATH with -H 'host: …'",
            quoted(url)
        ),
    };
    let mut request = Request::builder().method(method).uri(target);
    for header in &args.headers {
        let (name, value) = field(header)?;
        request = request.header(name, value);
    }
    let (mut head, ()) = request.body(())?.into_parts();
    if !head.headers.contains_key(HOST) {
        let host = authority.as_deref().unwrap_or("localhost");
        head.headers.insert(HOST, HeaderValue::from_str(host)?);
    }
    if let Some(body) = &args.data {
        head.headers.insert(CONTENT_LENGTH, body.len().into());
        let form = HeaderValue::from_static("application/x-www-form-urlencoded");
        head.headers.entry(CONTENT_TYPE).or_insert(form);
    }
    Ok(Described {
        head,
        peer: args.peer,
        body: args.data.as_ref().map(|body| body.clone().into_bytes()),
    })
}

/// `name: value`. The message never shows the value.
fn field(text: &str) -> anyhow::Result<(HeaderName, HeaderValue)> {
    let Some((name, value)) = text.split_once(':') else {
        bail!("a header is written 'name: value', with a colon");
    };
    let name = HeaderName::from_bytes(name.as_bytes())
        .with_context(|| format!("{} is not the name of a header", quoted(name)))?;
    let value = HeaderValue::from_str(value.trim_matches([' ', '\t']))
        .with_context(|| format!("the value of {name} has characters that no header holds"))?;
    Ok((name, value))
}

fn quoted(text: &str) -> String {
    format!("`{}`", text.escape_debug())
}
