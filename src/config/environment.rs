//! Expands `${NAME}` and `${NAME:-default}`. A variable may hold a secret, so no message repeats
//! its value.

use super::{
    code::Code,
    diagnostic::{PendingDiagnostic, quote},
};

/// Looks up an environment variable.
pub(super) type Lookup<'a> = &'a dyn Fn(&str) -> Option<String>;

/// Replaces every reference once; replacements are not expanded again. `$${` stands for `${`
/// itself.
pub(super) fn expand(text: &str, env: Lookup<'_>) -> Result<String, PendingDiagnostic> {
    let bad = |message: String, hint: &str| {
        Err(PendingDiagnostic::new(Code::Environment, message).hint(hint))
    };
    let mut expanded = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find("${") {
        if rest[..at].ends_with('$') {
            expanded.push_str(&rest[..at]);
            expanded.push('{');
            rest = &rest[at + 2..];
            continue;
        }
        expanded.push_str(&rest[..at]);
        let Some((reference, after)) = rest[at + 2..].split_once('}') else {
            return bad(
                "`${` is not closed".to_owned(),
                "write `${NAME}`, or `$${` for a literal `${`",
            );
        };
        let (name, default) = match reference.split_once(":-") {
            Some((name, default)) => (name, Some(default)),
            None => (reference, None),
        };
        if !is_name(name) {
            let hint = "use letters, digits and `_`, for example `${API_HOST}` or `${PORT:-8080}`";
            return bad(format!("{} is not a variable name", quote(name)), hint);
        }
        match env(name).as_deref().or(default) {
            Some(value) => expanded.push_str(value),
            None => {
                let hint = format!("set it, or give a default: `${{{name}:-default}}`");
                return bad(
                    format!("the environment variable {} is not set", quote(name)),
                    &hint,
                );
            }
        }
        rest = after;
    }
    expanded.push_str(rest);
    Ok(expanded)
}

fn is_name(name: &str) -> bool {
    name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
        && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn env(name: &str) -> Option<String> {
        (name == "HOST").then(|| "10.0.0.1${HOST}".to_owned())
    }

    #[test]
    fn references_are_replaced_once() {
        assert_eq!(
            expand("http://${HOST}:1", &env),
            Ok("http://10.0.0.1${HOST}:1".to_owned())
        );
        assert_eq!(
            expand("${PORT:-8080}${NONE:-}", &env),
            Ok("8080".to_owned())
        );
        assert_eq!(
            expand("$${HOST} $5 {x}", &env),
            Ok("${HOST} $5 {x}".to_owned())
        );
    }

    #[test]
    fn a_reference_without_a_value_is_an_error() {
        for text in ["${UNSET}", "${HOST", "${}", "${a b}", "${1}"] {
            assert_eq!(expand(text, &env).expect_err(text).code, Code::Environment);
        }
    }
}
