//! Finds out whether the demo model is there. A published crate has no room for its weights.

fn main() {
    const WEIGHTS: &str = "demo-model/model.safetensors";
    println!("cargo::rerun-if-changed={WEIGHTS}");
    println!("cargo::rustc-check-cfg=cfg(demo_model)");
    if std::path::Path::new(WEIGHTS).is_file() {
        println!("cargo::rustc-cfg=demo_model");
    }
}
