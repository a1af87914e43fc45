async ({ base64, width, height, runs }) => {
    const data = Uint8ClampedArray.from(atob(base64), (character) => character.charCodeAt(0));
    const times = [];
    for (let run = 0; run < runs; run++) times.push((await engine.pixels({ data, width, height })).ms);
    return times;
}
