//! An explanation as text, for people.

use std::fmt::{self, Display, Write as _};

use super::report::{
    ClientShown, ExplainedOutcome, ExplainedRequest, Explanation, Forwarded, LimitShown, Outcome,
    RouteShown, whole_seconds,
};

/// Formats an explanation for people.
#[derive(Debug)]
pub struct ExplanationText<'a>(pub &'a Explanation);

impl Display for ExplanationText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let explanation = self.0;
        write_client(f, &explanation.who)?;
        if let Some(asked) = &explanation.asked {
            write_request(f, asked)?;
            if explanation.limits.is_empty() {
                f.write_str("\nlimits\n  none\n")?;
            } else {
                writeln!(f, "\nlimits, {}", explanation.when)?;
            }
            for shown in &explanation.limits {
                limit(f, shown, asked.cost)?;
            }
        }
        answer(f, &explanation.answer)
    }
}

fn write_client(f: &mut fmt::Formatter<'_>, who: &ClientShown) -> fmt::Result {
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

fn write_request(f: &mut fmt::Formatter<'_>, asked: &ExplainedRequest) -> fmt::Result {
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
        None => f.write_str("  route      none: only the limits of [gateway] apply\n")?,
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
    let shared = match limit.scope {
        "global" => ", shared with other gateways",
        _ => "",
    };
    writeln!(
        f,
        "             {} ({}{shared}){because}",
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
        Outcome::Observed { would_reject: true } => "would reject, and only observes".to_owned(),
        Outcome::Observed {
            would_reject: false,
        } => "observes, and would admit".to_owned(),
        Outcome::NotApplied(why) => return format!("does not apply: {why}"),
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

fn answer(f: &mut fmt::Formatter<'_>, answer: &ExplainedOutcome) -> fmt::Result {
    f.write_str("\nanswer\n")?;
    match answer {
        ExplainedOutcome::Forwarded(forwarded) => sent_on(f, forwarded),
        ExplainedOutcome::Denied { retry_after } => match retry_after {
            Some(wait) => writeln!(f, "  429, Retry-After: {}", whole_seconds(*wait)),
            None => f.write_str("  429: no retry can succeed\n"),
        },
        ExplainedOutcome::OwnQuotas => writeln!(f, "  200: the caller's own quotas (status_path)"),
        ExplainedOutcome::Refused(refused) => {
            writeln!(f, "  {}: {}", refused.status, refused.sentence)
        }
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

fn quoted(text: &str) -> String {
    format!("`{}`", text.escape_debug())
}
