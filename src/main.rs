//! The binary: runs the library's command line and exits with its code.

#[cfg(target_env = "musl")]
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> std::process::ExitCode {
    // for crates that read the process default; tidegate passes its provider explicitly.
    // The result is ignored because nothing was installed before
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    tidegate::cli::main()
}
