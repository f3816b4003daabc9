//! Host, path and method patterns, and their precedence.

/// What one route matches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pattern {
    /// Exact names or `*.example.com`; empty is any host.
    pub hosts: Vec<String>,
    /// `/exact`, `/users/{id}` or `/files/{*rest}`.
    pub path: String,
    /// Empty is any method.
    pub methods: Vec<http::Method>,
}
