//! The binary: hands the command line to the library and exits with its code.

#[cfg(target_env = "musl")]
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> std::process::ExitCode {
    // for crates that read the process's default; ours is passed wherever it is used. Nothing was installed before
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    tidegate::cli::main()
}
