//! `tidegate explain`: what becomes of a described request, step by step, without a gateway that runs.

use std::{
    fmt::{self, Display, Write as _},
    io::Write as _,
    net::IpAddr,
    path::PathBuf,
    process::ExitCode,
};

use anyhow::{Context as _, bail};
use clap::Args;
use http::{
    HeaderName, HeaderValue, Method, Request, Uri,
    header::{CONTENT_LENGTH, CONTENT_TYPE, HOST},
};

use super::{ConfigFile, check::Format};
use crate::{
    config,
    gateway::explain::{
        Answer, Asked, Described, Explanation, Forwarded, LimitShown, Outcome, RouteShown, Who,
        explain as explain_request, whole_seconds,
    },
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

/// An explanation for people.
struct Text<'a>(&'a Explanation);

impl Display for Text<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let explanation = self.0;
        who(f, &explanation.who)?;
        if let Some(asked) = &explanation.asked {
            what(f, asked)?;
            if explanation.limits.is_empty() {
                f.write_str("\nlimits\n  none\n")?;
            } else {
                f.write_str("\nlimits, if nothing has been spent from them yet\n")?;
            }
            for shown in &explanation.limits {
                limit(f, shown, asked.cost)?;
            }
        }
        answer(f, &explanation.answer)
    }
}

fn who(f: &mut fmt::Formatter<'_>, who: &Who) -> fmt::Result {
    f.write_str("client\n")?;
    let mut steps = who.steps.iter();
    if let Some(peer) = steps.next() {
        writeln!(f, "  {peer}")?;
    }
    if let Some(header) = &who.header
        && steps.len() > 0
    {
        writeln!(f, "  {header}, from the right:")?;
    }
    for step in steps {
        writeln!(f, "    {step}")?;
    }
    write!(f, "  address    {}", who.address)?;
    match who.doubt {
        Some(doubt) => writeln!(
            f,
            "   (in doubt: {doubt}; others behind the same proxy may share it)"
        )?,
        None => f.write_str("\n")?,
    }
    for (at, tried) in who.users.iter().enumerate() {
        writeln!(
            f,
            "  [[user]] {} {}: {}",
            at + 1,
            tried.source,
            tried.outcome
        )?;
    }
    let of = |word: &str, text: &Option<String>| match text {
        Some(text) => format!(", {word} {}", text.escape_debug()),
        None => String::new(),
    };
    match &who.user {
        Some(user) => writeln!(
            f,
            "  user       {}{}{}",
            user.escape_debug(),
            of("tier", &who.tier),
            of("tenant", &who.tenant)
        ),
        None => f.write_str("  user       none\n"),
    }
}

fn what(f: &mut fmt::Formatter<'_>, asked: &Asked) -> fmt::Result {
    let path = |path: &str| path.escape_debug().to_string();
    writeln!(
        f,
        "\nrequest\n  {} {}{}",
        asked.method,
        asked.host,
        path(&asked.path)
    )?;
    if asked.matched_path != asked.path {
        writeln!(f, "  matched as {}", path(&asked.matched_path))?;
    }
    if asked.sent_path != asked.path {
        writeln!(f, "  sent as    {}", path(&asked.sent_path))?;
    }
    let shown = |route: &RouteShown| format!("{} ({})", route.name, route.pattern);
    match &asked.route {
        Some(route) => writeln!(f, "  route      {}", shown(route))?,
        None => f.write_str("  route      none: it meets the limits of [gateway] only\n")?,
    }
    for route in &asked.also {
        let why = if asked.route.is_some() {
            "less specific, or for other methods"
        } else {
            "for other methods"
        };
        writeln!(f, "  not        {}: {why}", shown(route))?;
    }
    for (name, value) in &asked.params {
        writeln!(f, "  {{{name}}} is {}", quoted(value))?;
    }
    if asked.cost > 1 {
        writeln!(f, "  cost       {} units of each limit", asked.cost)?;
    }
    Ok(())
}

fn limit(f: &mut fmt::Formatter<'_>, limit: &LimitShown, cost: u64) -> fmt::Result {
    writeln!(f, "  {:<10} {}", limit.name, outcome(limit, cost))?;
    let per = if limit.parts.is_empty() {
        "one bucket for all".to_owned()
    } else {
        limit.key.escape_debug().to_string()
    };
    writeln!(f, "             key {per}")?;
    if limit.quota.is_empty() {
        return Ok(());
    }
    let because = match limit.because.as_str() {
        "" => String::new(),
        because => format!("; {because}"),
    };
    writeln!(
        f,
        "             {} ({}){because}",
        limit.quota, limit.algorithm
    )
}

fn outcome(limit: &LimitShown, cost: u64) -> String {
    let mut text = match &limit.outcome {
        Outcome::Admitted => "admits".to_owned(),
        Outcome::CountsLater(statuses) => {
            let statuses: Vec<String> = statuses.iter().map(u16::to_string).collect();
            format!(
                "admits, and is charged if the answer is {}",
                statuses.join(", ")
            )
        }
        Outcome::Delayed(delay) => format!("admits, after holding it for {delay:?}"),
        Outcome::Rejected { never: true, .. }
            if limit
                .standing
                .is_some_and(|standing| standing.capacity < cost) =>
        {
            "REJECTS: the request costs more than there can ever be".to_owned()
        }
        Outcome::Rejected { never: true, .. } => "REJECTS, for ever".to_owned(),
        Outcome::Rejected { retry_after, .. } => match retry_after {
            Some(wait) => format!("REJECTS, for {} s", whole_seconds(*wait)),
            None => "REJECTS".to_owned(),
        },
        Outcome::Unkeyed => {
            "REFUSES: a part of its key has no value (missing = \"reject\")".to_owned()
        }
        Outcome::Tagged => "would reject, and only tells the upstream (mode = \"tag\")".to_owned(),
        Outcome::LookedOn { would_reject: true } => "would reject, and only looks on".to_owned(),
        Outcome::LookedOn {
            would_reject: false,
        } => "looks on, and would admit".to_owned(),
        Outcome::NotMet(why) => return format!("is not met: {why}"),
    };
    if let Some(standing) = limit.standing {
        let _ = write!(
            text,
            ", {} of {} left",
            standing.remaining, standing.capacity
        );
    }
    text
}

fn answer(f: &mut fmt::Formatter<'_>, answer: &Answer) -> fmt::Result {
    f.write_str("\nanswer\n")?;
    match answer {
        Answer::Forwarded(forwarded) => sent_on(f, forwarded),
        Answer::Denied { retry_after } => match retry_after {
            Some(wait) => writeln!(f, "  429, Retry-After: {}", whole_seconds(*wait)),
            None => f.write_str("  429, and no wait helps\n"),
        },
        Answer::OwnQuotas => writeln!(f, "  200: the caller's own quotas (status_path)"),
        Answer::Refused(refused) => writeln!(f, "  {}: {}", refused.status, refused.sentence),
    }
}

fn sent_on(f: &mut fmt::Formatter<'_>, forwarded: &Forwarded) -> fmt::Result {
    if !forwarded.delay.is_zero() {
        writeln!(f, "  held for {:?}, then", forwarded.delay)?;
    }
    writeln!(
        f,
        "  sent on to {}: {}",
        forwarded.upstream,
        forwarded.servers.join(", ")
    )?;
    for (name, value) in &forwarded.sets {
        writeln!(f, "  + {name}: {value}")?;
    }
    for name in &forwarded.removes {
        writeln!(f, "  - {name}")?;
    }
    Ok(())
}
