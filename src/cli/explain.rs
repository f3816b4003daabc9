//! `tidegate explain`: explains step by step how tidegate decides a described request, from a
//! configuration file or on a running gateway with its counters. Also explains a past decision of a
//! running gateway.

use std::{
    io::Write as _,
    net::IpAddr,
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::{Context as _, bail};
use clap::Args;
use http::{
    HeaderName, HeaderValue, Method, Request, Uri,
    header::{CONTENT_LENGTH, CONTENT_TYPE, HOST},
};

use serde_json::{Value, json};

use super::{
    admin::AdminAddress,
    check::Format,
    config_file::ConfigFile,
    terminal::{printable, printable_json, printable_line},
};
use crate::{
    config,
    gateway::{
        described::{Described, DescribedBody},
        explain::{ExplanationText, explain as explain_request},
    },
    listener::tls::PresentedChain,
};

/// Arguments of `tidegate explain`.
#[derive(Clone, Debug, Args)]
#[command(
    after_help = "Examples:\n  tidegate explain http://api.example.com/v1/export\n  tidegate explain POST /login --peer 10.0.0.1 -H 'x-forwarded-for: 203.0.113.9' -d 'username=alice'\n\n  tidegate explain --request-id 5f0c2ad91e6b4c77a1d0e3f2b9488a61 --admin http://127.0.0.1:9901\n\nWith a configuration file, the request is decided as the first request after a start. With --admin, a running gateway says what it would do now, and charges nothing."
)]
pub struct ExplainArgs {
    /// The URL or path of the request, after an optional method (default GET, or POST with
    /// --data)
    #[arg(value_name = "[METHOD] URL", num_args = 1..=2, required_unless_present = "request_id")]
    request: Vec<String>,
    /// Explain a past decision, by the X-Request-Id of the response
    #[arg(long, value_name = "ID", conflicts_with_all = ["request", "config", "headers", "client_cert", "data"])]
    request_id: Option<String>,
    #[command(flatten)]
    gateway: AdminAddress,
    /// The configuration file [env: TIDEGATE_CONFIG] [default: gateway.toml]
    #[arg(short, long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// A header of the request, for example 'x-api-key: secret'; may be repeated. Its value is
    /// never printed
    #[arg(short = 'H', long = "header", value_name = "NAME: VALUE")]
    headers: Vec<String>,
    /// The peer of the connection: the client, or the last proxy in front of the gateway
    #[arg(long, value_name = "IP", default_value = "127.0.0.1")]
    peer: IpAddr,
    /// The client certificate (mutual TLS) as a PEM file; its key is not needed
    #[arg(long, value_name = "FILE")]
    client_cert: Option<PathBuf>,
    /// The request body, for limits keyed by a body field; a form unless a content-type header
    /// says otherwise
    #[arg(short, long, value_name = "BODY")]
    data: Option<String>,
    /// How to print the explanation
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

/// Explains a request: exits 0 whatever the decision, 1 if the configuration or the request is
/// invalid.
pub fn explain(args: &ExplainArgs) -> ExitCode {
    match try_explain(args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let error = printable(&format!("{error:#}"));
            let _ = writeln!(anstream::stderr(), "error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn try_explain(args: &ExplainArgs) -> anyhow::Result<()> {
    if let Some(id) = &args.request_id {
        return show(args, &remembered(&args.gateway, id)?);
    }
    let described = described(args)?;
    if args.gateway.admin.is_some() && args.config.is_none() {
        let asked = asked(args, &described)?;
        let explained = args.gateway.ask("POST", "explain", &asked)?;
        return show(args, &explained);
    }
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
        Format::Text => ExplanationText(&explanation).to_string(),
        Format::Json => format!("{}\n", explanation.json()),
    };
    // a closed pipe is not a failure
    let _ = std::io::stdout().write_all(text.as_bytes());
    Ok(())
}

/// Fetches a past decision from a running gateway.
fn remembered(gateway: &AdminAddress, id: &str) -> anyhow::Result<Value> {
    if id.is_empty() || !id.bytes().all(|byte| byte.is_ascii_graphic()) {
        bail!(
            "{} is not a request id: copy it from X-Request-Id of the response",
            quoted(id)
        );
    }
    let escaped = id.bytes().map(|byte| match byte {
        b'0'..=b'9' | b'a'..=b'z' | b'A'..=b'Z' | b'-' | b'_' => char::from(byte).to_string(),
        _ => format!("%{byte:02x}"),
    });
    let path = format!("decisions/{}", escaped.collect::<String>());
    gateway.ask("GET", &path, &Value::Null)
}

/// The body of the admin API call for the described request.
fn asked(args: &ExplainArgs, described: &Described) -> anyhow::Result<Value> {
    let fields = described.head.headers.iter().map(|(name, value)| {
        let value = value.to_str();
        Ok(json!([
            name.as_str(),
            value.with_context(|| format!("the value of {name} is not text"))?
        ]))
    });
    let fields: Vec<Value> = fields.collect::<anyhow::Result<_>>()?;
    let mut asked = json!({
        "method": described.head.method.as_str(),
        "url": described.head.uri.to_string(),
        "headers": fields,
        "peer": described.peer.to_string(),
        "body": args.data,
    });
    // only if there is one: older gateways reject this key
    if let Some(presented) = &described.certificate {
        asked["client_cert"] = json!(presented.pem());
    }
    Ok(asked)
}

/// Prints the explanation from a running gateway.
fn show(args: &ExplainArgs, explained: &Value) -> anyhow::Result<()> {
    let mut text = String::new();
    if let (Some(id), Some(at)) = (explained["request_id"].as_str(), explained["at"].as_str()) {
        let outcome = explained["outcome"].as_str().unwrap_or_default();
        text = printable_line(&format!("request {id} was {outcome} at {at}")) + "\n\n";
    }
    let text = match args.format {
        Format::Text => {
            let explanation = explained["text"].as_str();
            text + &printable(explanation.context("the response has no explanation")?)
        }
        Format::Json => printable_json(&explained.to_string()) + "\n",
    };
    // a closed pipe is not a failure
    let _ = std::io::stdout().write_all(text.as_bytes());
    Ok(())
}

/// The request exactly as a client would send it: the path is not normalised.
fn described(args: &ExplainArgs) -> anyhow::Result<Described> {
    let (method, url) = match args.request.as_slice() {
        [method, url] => (method.as_str(), url),
        [url] if args.data.is_some() => ("POST", url),
        [url] => ("GET", url),
        _ => bail!("give one URL, optionally after a method"),
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
        // an empty path after a host means the root
        Some(target) if authority.is_none() || uri.scheme().is_some() => target.to_string(),
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
        certificate: args.client_cert.as_deref().map(presented).transpose()?,
        body: match &args.data {
            Some(body) => DescribedBody::Whole(body.clone().into_bytes()),
            None => DescribedBody::Absent,
        },
    })
}

/// Reads a client certificate.
fn presented(file: &Path) -> anyhow::Result<PresentedChain> {
    let shown = file.display();
    let pem =
        config::read_file(file).map_err(|why| anyhow::anyhow!("{shown} cannot be read: {why}"))?;
    PresentedChain::parse(&pem).map_err(|fault| {
        anyhow::anyhow!("{shown} {fault}: name a PEM file with the client's certificate, followed by any intermediates")
    })
}

/// Parses `name: value`. No message shows the value.
fn field(text: &str) -> anyhow::Result<(HeaderName, HeaderValue)> {
    let Some((name, value)) = text.split_once(':') else {
        bail!("this header has no colon: write 'name: value'");
    };
    let name = HeaderName::from_bytes(name.as_bytes())
        .with_context(|| format!("{} is not a header name", quoted(name)))?;
    let value = HeaderValue::from_str(value.trim_matches([' ', '\t'])).with_context(|| {
        format!("the value of {name} has characters that a header cannot contain")
    })?;
    Ok((name, value))
}

fn quoted(text: &str) -> String {
    format!("`{}`", text.escape_debug())
}
