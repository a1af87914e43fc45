async () => {
    const { Engine } = await import("./engine.js");
    window.engine = new Engine(await (await fetch("../pack.json")).json());
    await engine.open();
}
