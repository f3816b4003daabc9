//! The page at `/`: what this gateway limits, and what else can be asked.

use std::fmt::{self, Write};

use http::{HeaderValue, Response, header::CONTENT_SECURITY_POLICY};

use super::{Endpoint, State, text};
use crate::{config::Snapshot, identity::KeyPart, listener::Address};

const HEAD: &str = "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>tidegate</title>\
<meta name=\"viewport\" content=\"width=device-width\"><style>\
:root{color-scheme:light dark}body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}\
table{border-collapse:collapse}td,th{text-align:left;vertical-align:top;padding:.2rem 1.5rem .2rem 0}\
code{font-family:ui-monospace,monospace}</style></head><body>\n";

/// Nothing is loaded and nothing runs, whatever a name in the configuration holds.
const POLICY: &str =
    "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'";

pub(super) fn overview(snapshot: &Snapshot, state: State) -> Response<String> {
    let mut html = HEAD.to_owned();
    // writing to a String does not fail
    let _ = write_overview(&mut html, snapshot, state);
    let mut response = text("text/html; charset=utf-8", html);
    response
        .headers_mut()
        .insert(CONTENT_SECURITY_POLICY, HeaderValue::from_static(POLICY));
    response
}

fn write_overview(html: &mut String, snapshot: &Snapshot, state: State) -> fmt::Result {
    let (version, hash) = (env!("CARGO_PKG_VERSION"), Escaped(&snapshot.hash));
    writeln!(
        html,
        "<h1>tidegate</h1>\n<p>Version {version}, {}, configuration <code>{hash}</code>.</p>",
        state.as_str()
    )?;

    html.push_str(
        "<h2>Limits</h2>\n<table><tr><th>name</th><th>per</th><th>tier</th><th>quota</th></tr>\n",
    );
    for limit in &snapshot.limits {
        let name = Escaped(&limit.name);
        let per = limit
            .key
            .iter()
            .map(KeyPart::to_string)
            .collect::<Vec<_>>()
            .join(" + ");
        let per = if per.is_empty() { "everybody" } else { &per };
        for (at, quota) in limit.quotas.iter().enumerate() {
            let tiers: Vec<&str> = limit
                .tiers
                .iter()
                .filter(|(_, quota)| *quota == at)
                .map(|(tier, _)| tier.as_str())
                .collect();
            let tiers = if at == 0 && tiers.is_empty() {
                "any".to_owned()
            } else {
                tiers.join(", ")
            };
            writeln!(
                html,
                "<tr><td><code>{name}</code></td><td>{}</td><td>{}</td><td>{quota}, at most {} at once</td></tr>",
                Escaped(per),
                Escaped(&tiers),
                quota.burst
            )?;
        }
    }

    html.push_str("</table>\n<h2>Routes</h2>\n<table><tr><th>name</th><th>path</th><th>limits</th><th>upstream</th></tr>\n");
    for route in &snapshot.routes {
        let names = route
            .limits
            .iter()
            .filter_map(|at| snapshot.limits.get(*at));
        let limits = names
            .map(|limit| limit.name.as_str())
            .collect::<Vec<_>>()
            .join(", ");
        let upstream = snapshot
            .upstreams
            .get(route.upstream)
            .map_or("", |upstream| upstream.name.as_str());
        writeln!(
            html,
            "<tr><td><code>{}</code></td><td><code>{}</code></td><td>{}</td><td>{}</td></tr>",
            Escaped(&route.name),
            Escaped(&route.pattern.path),
            Escaped(&limits),
            Escaped(upstream)
        )?;
    }

    html.push_str("</table>\n<h2>Listeners</h2>\n<ul>\n");
    for listener in &snapshot.listeners {
        match &listener.address {
            Address::Tcp(address) => writeln!(html, "<li><code>{address}</code></li>")?,
            Address::Systemd(name) => {
                writeln!(html, "<li><code>systemd:{}</code></li>", Escaped(name))?
            }
            Address::Unix(path) => writeln!(
                html,
                "<li><code>unix:{}</code></li>",
                Escaped(&path.to_string_lossy())
            )?,
        }
    }

    html.push_str("</ul>\n<h2>Here</h2>\n<table>\n");
    for (_, path, what) in Endpoint::ALL {
        writeln!(
            html,
            "<tr><td><a href=\"{path}\">{path}</a></td><td>{what}</td></tr>"
        )?;
    }
    html.push_str("</table>\n</body></html>\n");
    Ok(())
}

/// Text inside an element or a quoted attribute.
struct Escaped<'a>(&'a str);

impl fmt::Display for Escaped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.chars().try_for_each(|c| match c {
            '<' => f.write_str("&lt;"),
            '>' => f.write_str("&gt;"),
            '&' => f.write_str("&amp;"),
            '"' => f.write_str("&quot;"),
            '\'' => f.write_str("&#39;"),
            c => f.write_char(c),
        })
    }
}
